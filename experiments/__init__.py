"""What drives the system from outside: training the demo model, measuring it, comparing it, and the records of each run."""
