"""What the cluster remembers: the shared store of drafts, and the Redis it lives in."""
