"""Lookahead parallelism: ranks that each hold the whole model share a draft tree.

In: the draft trees of a step.
Out: one merged outcome per tree.
"""
