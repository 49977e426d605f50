"""The HTTP interface.

In: requests.
Out: answers in OpenAI's shapes.
"""
