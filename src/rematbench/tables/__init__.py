"""Tables and the page: read records and answers, write CSV, Markdown, LaTeX and HTML."""
