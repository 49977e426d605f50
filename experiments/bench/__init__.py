"""What measurements share, and ``outrider bench``. In: prompts. Out: a record and a figure."""
