"""One forward of a model over the rows of a step.

In: a batch of trees.
Out: logits, the same to the last bit in any company.
"""
