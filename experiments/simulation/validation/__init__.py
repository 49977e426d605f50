"""What the simulation predicts, beside what the engine then does."""
