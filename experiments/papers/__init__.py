"""The tables and figures of the papers, run on what is at hand, beside the papers' own numbers."""
