"""Published numbers and statements of the papers, as YAML with a loader that checks them."""
