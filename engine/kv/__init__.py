"""Keys and values: slots, and what may be reused in them.

In: tokens.
Out: where they are computed already.
"""
