"""``outrider serve``: checks before the start, then starting and stopping the service in order.

In: a configuration.
Out: a running service.
"""
