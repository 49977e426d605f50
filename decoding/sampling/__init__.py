"""Sampling. In: a row of logits, sampling parameters. Out: a token that is a function of (seed, position)."""
