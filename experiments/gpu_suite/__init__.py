"""All that is to be measured on a GPU, in one call. In: a machine with a GPU. Out: a record and a short table."""
