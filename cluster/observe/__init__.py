"""Observability: metrics, traces, and audits of served outputs. In: counts and served answers. Out: pages and records."""
