"""What operators see: metrics, traces, audits.

In: counts and served answers.
Out: pages and records.
"""
