"""What replicas remember and share, measured without a model. In: known outputs. Out: tokens per step, times and bytes."""
