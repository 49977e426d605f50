"""``outrider generate``, and files of prompts.

In: prompts.
Out: records.
"""
