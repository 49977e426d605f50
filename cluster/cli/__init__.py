"""The command ``outrider``. In: a command line. Out: an exit code."""
