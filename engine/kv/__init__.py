"""KV cache: slots, prefix reuse, and recurrent states.

In: tokens.
Out: slots with the KV of their first tokens.
"""
