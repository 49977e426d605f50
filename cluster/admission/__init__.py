"""Who may come in, as whom, and how much: keys, rate limits, places.

In: headers and sizes.
Out: tickets or refusals.
"""
