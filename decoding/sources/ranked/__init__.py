"""Rankings of the target, stored by token and by context. In: computed trees. Out: likely next tokens."""
