"""Where things live: engine replicas and, later, groups of them, each a plain class that runs without Ray."""
