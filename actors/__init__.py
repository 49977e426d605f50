"""Engines as processes: one replica, and groups of ranks that share its steps.

In: requests, from any event loop.
Out: outputs, whatever becomes of the ranks.
"""
