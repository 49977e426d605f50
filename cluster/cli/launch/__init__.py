"""``outrider serve``: checks, then starting and stopping in order. In: a configuration. Out: a running service."""
