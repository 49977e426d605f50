"""Tensor and pipeline parallelism: ranks that each hold a part of the model. In: a forward pass. Out: its logits."""
