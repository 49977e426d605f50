"""Recurrent layers of hybrid models: hooks into their functions, and compiled code that replaces these.

In: rows of all requests for one layer.
Out: each row's output along its own path in the draft tree.
"""
