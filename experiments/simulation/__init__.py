"""A cluster in simulated time: steps, replicas, arrivals. In: texts, GPUs, traffic. Out: latencies and costs."""
