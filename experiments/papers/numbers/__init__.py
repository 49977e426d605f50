"""What the papers published, as their tables have it."""
