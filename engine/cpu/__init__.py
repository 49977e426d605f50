"""CPU forward passes by the engine's own compiled kernels.

In: rows and KV slots.
Out: logits.
"""
