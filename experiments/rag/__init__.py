"""A RAG assistant over Outrider, and traffic like an enterprise's. In: documents and questions. Out: answers, and their speed."""
