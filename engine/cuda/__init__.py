"""CUDA forward passes of fixed shapes, captured as CUDA graphs.

In: rows and KV slots.
Out: logits.
"""
