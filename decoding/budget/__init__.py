"""Which rows to draft and how many.

In: candidates with chances, and the time that rows take.
Out: a draft tree that pays.
"""
