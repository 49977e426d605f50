"""What the simulation predicts for the GPUs of papers, beside what they published."""
