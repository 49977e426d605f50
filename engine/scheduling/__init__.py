"""Which requests run and how many rows each gets.

In: requests.
Out: shares of the next step.
"""
