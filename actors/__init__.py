"""Replicas and rank groups: engines that run as processes.

In: requests from any event loop.
Out: outputs, also when ranks fail.
"""
