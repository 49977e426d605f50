"""Replays of known outputs without a model: strategies, replicas that share a cache, and the speed of the trie."""
