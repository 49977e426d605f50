"""What generates from the same prompts, in turns. In: prompts. Out: what each did, and how long it took."""
