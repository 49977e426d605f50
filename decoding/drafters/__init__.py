"""Drafters: one strategy per file. In: requests, and row budgets. Out: a draft tree for each request."""
