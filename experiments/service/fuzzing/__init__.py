"""Requests of the fuzzer, drawn by a seed. In: a seed and a number. Out: a request, reduced where it fails."""
