"""Sampling: from a row of logits to one token.

In: logits and the sampling parameters of a request.
Out: a token that is a function of (seed, position).
"""
