"""How one step is computed: scheduling, packing, the forward of a stock model over KV slots, committing."""
