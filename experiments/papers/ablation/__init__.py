"""The published trie as a reference, and what each of its parts brings. In: known outputs. Out: tokens per step."""
