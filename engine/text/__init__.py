"""Text on both sides of an engine: chats to prompts, tokens to text, grammars.

In: messages, schemas, tokens.
Out: tokens, text.
"""
