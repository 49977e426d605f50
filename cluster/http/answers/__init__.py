"""Answers, whole and in events.

In: outputs of the engine.
Out: JSON and server-sent events.
"""
