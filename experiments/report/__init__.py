"""Records as tables in documents, on a terminal and on a page. In: records. Out: Markdown, HTML, figures."""
