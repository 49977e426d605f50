"""From a row of logits to one token.

In: logits and what a request asks for.
Out: a token that is a function of (seed, position).
"""
