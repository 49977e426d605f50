"""Sources of draft tokens: past outputs, prompts and documents.

In: tokens.
Out: continuations.
"""
