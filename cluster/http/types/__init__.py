"""Request bodies, with bounds on every field. In: JSON. Out: validated types."""
