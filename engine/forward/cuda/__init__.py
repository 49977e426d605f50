"""Forwards on a GPU of fixed shapes, captured as CUDA graphs.

In: rows and KV slots.
Out: logits.
"""
