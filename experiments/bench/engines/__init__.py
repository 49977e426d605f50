"""Contestants that generate from the same prompts in turns, and their measurements."""
