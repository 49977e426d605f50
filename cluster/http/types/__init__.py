"""What bodies of requests may hold, each field bounded.

In: JSON.
Out: checked types.
"""
