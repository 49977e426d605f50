"""Placement of processes: Ray clusters, CPU cores, and actors in bundles. In: options. Out: placements."""
