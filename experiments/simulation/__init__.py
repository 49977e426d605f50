"""A cluster in simulated time: what steps take, replicas along known outputs, arrivals, and what comes of them."""
