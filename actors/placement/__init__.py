"""Placement of processes: Ray clusters, CPU cores, and the ranks of each group. In: options. Out: placements."""
