"""The one that keeps Redis in order: snapshots, quotas, time to live, deletions.

In: streams.
Out: snapshots.
"""
