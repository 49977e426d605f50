"""Lookahead parallelism: ranks that each hold the model share a draft tree.

In: the trees of a step.
Out: one outcome.
"""
