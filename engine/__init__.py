"""The step loop over a model in this process: schedule, draft, forward, verify, commit.

In: requests as token ids.
Out: outputs, step by step.
"""
