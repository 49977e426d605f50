"""What to guess and what to accept: numpy and torch operations only, no I/O, no clock, no hidden randomness."""
