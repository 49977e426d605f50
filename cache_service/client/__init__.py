"""Replica's local copy of the shared cache. In: outputs of this replica and others. Out: histories for drafting."""
