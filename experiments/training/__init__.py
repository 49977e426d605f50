"""The demo model: its data, its training, and whether it copies. In: text. Out: weights."""
