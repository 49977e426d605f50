"""Records as tables in documents and on a terminal. In: records. Out: Markdown, figures."""
