"""Weights in the formats that people have: GGUF files, quantized checkpoints, and adapters.

In: files.
Out: weights as they are computed with, or one line that says why not.
"""
