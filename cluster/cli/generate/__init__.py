"""``outrider generate``, and prompt files. In: prompts. Out: records."""
