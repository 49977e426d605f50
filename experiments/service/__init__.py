"""Measurements of what clients of ``outrider serve`` see. In: requests of every kind. Out: answers, counts and times."""
