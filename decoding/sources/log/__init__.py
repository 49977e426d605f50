"""Log of past texts with chains of n-gram occurrences: an implicit trie. In: outputs. Out: branches."""
