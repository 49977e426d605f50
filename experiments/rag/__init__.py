"""A RAG assistant over a running server, and a day of requests. In: documents and questions. Out: answers, and their speed."""
