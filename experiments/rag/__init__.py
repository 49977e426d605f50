"""An assistant over documents, through LangChain or LlamaIndex. In: folders of documents, and questions. Out: answers that say where they come from."""
