"""What drives the system from outside: measurements, faults, the training of the demo model, and records."""
