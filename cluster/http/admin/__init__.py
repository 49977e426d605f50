"""The operator's routes, ``/admin``.

In: requests with an admin key.
Out: what the server remembers, and what became of audits.
"""
