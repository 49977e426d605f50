"""One forward pass of the model over all rows of a step.

In: a batch of draft trees.
Out: logits, bit-identical whatever else the batch contains.
"""
