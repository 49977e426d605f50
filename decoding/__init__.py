"""What to guess and what to accept: numpy and torch operations only, no I/O, no clock, no hidden randomness.

In: a request and what the model said.
Out: a draft tree, and what of it is accepted.
"""
