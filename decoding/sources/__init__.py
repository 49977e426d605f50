"""Sources of draft tokens. In: tokens of past outputs, prompts and documents. Out: continuations."""
