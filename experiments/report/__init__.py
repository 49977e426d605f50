"""Records as pages, tables and figures. In: records. Out: HTML, markdown, SVG."""
