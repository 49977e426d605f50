"""Between the HTTP interface and the engine replicas: handles, failover, health, draining. In: jobs. Out: outputs."""
