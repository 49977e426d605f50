"""Strategies with a second, smaller draft model. In: a request. Out: a tree, and the rule that verifies it."""
