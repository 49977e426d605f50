"""A replica's copy of what the cluster remembers.

In: outputs of this replica and others.
Out: histories to draft from.
"""
