"""Emulated GPUs: forwards take a GPU's time by sleeping. In: rows of a step. Out: logits or known outputs, after that time."""
