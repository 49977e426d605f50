"""Verification of draft trees. In: the tree and the target's output at its rows. Out: an ``Acceptance``."""
