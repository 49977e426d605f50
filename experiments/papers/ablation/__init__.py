"""Published trie as a reference, and its ablation. In: known outputs. Out: tokens per step."""
