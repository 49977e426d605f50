"""Shared cache: generated texts of all replicas, by tenant, in Redis.

In: tokens that replicas emit.
Out: texts from which every replica of the tenant drafts.
"""
