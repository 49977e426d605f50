"""What to accept of a draft tree.

In: the tree and what the target says at its rows.
Out: an ``Acceptance``.
"""
