"""Cache service that maintains Redis: snapshots, quotas, time to live, deletions. In: streams. Out: snapshots."""
