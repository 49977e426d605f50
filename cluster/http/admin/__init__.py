"""Operator routes below ``/admin``.

In: requests with an admin key.
Out: contents of the shared cache, audit results and baseline comparisons.
"""
