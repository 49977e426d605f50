"""Measurements of an engine: step times, energy, counters.

In: steps.
Out: curves and counts.
"""
