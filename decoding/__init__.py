"""Drafting and verification of tokens: numpy and torch operations only, no I/O, no clock, no hidden randomness.

In: a request and the output of the target model. Out: a draft tree, and its accepted rows.
"""
