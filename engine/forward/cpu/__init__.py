"""Forwards on a CPU in machine code of our own.

In: rows and KV slots.
Out: logits.
"""
