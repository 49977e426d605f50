"""Command line, HTTP interface and Serve application. In: commands, requests. Out: responses in OpenAI's format."""
