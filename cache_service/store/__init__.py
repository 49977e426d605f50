"""Redis client: connections, commands, names of keys. In: an address. Out: streams, snapshots and leases."""
