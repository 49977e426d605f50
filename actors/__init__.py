"""Replicas and rank groups. In: requests from any event loop. Out: outputs, also when ranks fail."""
