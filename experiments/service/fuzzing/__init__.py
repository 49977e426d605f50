"""Cases of the fuzzer: requests by a seed, what became of them, and the smallest that fails likewise."""
