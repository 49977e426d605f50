"""Strong scaling: one worker and several together on the same requests."""
