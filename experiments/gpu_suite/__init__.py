"""Checks and measurements of a GPU in one call: ``outrider bench gpu``. In: a machine with a GPU. Out: a record and a table."""
