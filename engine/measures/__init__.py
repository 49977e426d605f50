"""What an engine measures: times of steps, energy, counters.

In: steps.
Out: curves and counts.
"""
