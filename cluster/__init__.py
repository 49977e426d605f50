"""The service: command line, HTTP interface, and the Ray Serve application.

In: commands and HTTP requests.
Out: responses in OpenAI's format.
"""
