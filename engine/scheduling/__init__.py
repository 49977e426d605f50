"""Scheduling: the requests that run, and the rows of each in a step.

In: requests.
Out: shares of the next step.
"""
