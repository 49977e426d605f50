"""What the cluster remembers: texts of all replicas, by tenant, in Redis.

In: what replicas emit.
Out: what every replica of the tenant drafts from.
"""
