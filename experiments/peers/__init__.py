"""Our engine beside other people's, in turns: the yardstick of every claim of speed. ``python -m experiments.peers --help``."""
