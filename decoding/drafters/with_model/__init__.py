"""Strategies that draft with a second, smaller model.

In: a request.
Out: a tree, and the rule that verifies it.
"""
