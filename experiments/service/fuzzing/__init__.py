"""Cases of the fuzzer, drawn by a seed. In: a server. Out: statuses, and the smallest input of each failure."""
