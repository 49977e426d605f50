"""Benches: shared runner, records and figures, and the commands of ``outrider bench``."""
