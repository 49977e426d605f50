"""Admission control: API keys, tenants, rate limits and places. In: headers and sizes. Out: tickets or refusals."""
