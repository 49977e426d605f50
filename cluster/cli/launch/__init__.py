"""``outrider serve``: what is checked, started and stopped, in order.

In: a configuration.
Out: a running service.
"""
