"""Rankings of the target from computed rows, stored by token and by context.

In: computed trees.
Out: likely next tokens.
"""
