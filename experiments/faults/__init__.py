"""Requests while ranks, machines or Redis fail. In: a fault. Out: answers compared with undisturbed ones, and times."""
