"""The parts of the GPU suite, each a function that a process of its own calls. In: a setting. Out: figures, as they come."""
