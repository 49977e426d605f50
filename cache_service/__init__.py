"""Texts of all replicas in Redis, by tenant. In: emitted tokens. Out: texts from which the tenant's replicas draft."""
