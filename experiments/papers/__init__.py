"""The tables and figures of five papers, run on what is at hand. In: prompts. Out: tables beside the papers' own."""
