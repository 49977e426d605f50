"""What the target ranked when it computed a row, kept by token and by context.

In: computed trees.
Out: likely next tokens.
"""
