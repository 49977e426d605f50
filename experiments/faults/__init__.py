"""What answers come to while ranks, replicas, machines or Redis fail. In: a fault. Out: answers beside undisturbed ones."""
