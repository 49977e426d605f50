"""Attention of a few rows in machine code of our own, for CPUs. Only imported where numba is installed."""
