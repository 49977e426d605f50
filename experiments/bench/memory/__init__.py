"""Replays of known outputs without a model: strategies, and replicas that share a cache."""
