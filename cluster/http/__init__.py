"""HTTP API of the server. In: requests. Out: responses in OpenAI's format."""
