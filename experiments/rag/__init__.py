"""An assistant over documents, through LangChain or LlamaIndex. In: documents and questions. Out: answers with their passages."""
