"""Where drafts come from: texts, and what the model said before.

In: tokens.
Out: continuations.
"""
