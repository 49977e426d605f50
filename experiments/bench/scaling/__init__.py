"""Strong scaling. In: a model, prompts, numbers of workers and of requests at once. Out: what each form does, and was to do."""
