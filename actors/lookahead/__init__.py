"""Lookahead parallelism: ranks with the whole model share draft trees. In: trees. Out: one merged outcome per tree."""
