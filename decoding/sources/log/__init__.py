"""Past texts as a log of tokens with chains of n-gram occurrences, an implicit trie.

In: outputs.
Out: branches.
"""
