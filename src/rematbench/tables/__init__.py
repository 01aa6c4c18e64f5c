"""Tables and the page: read records and answers, write CSV, JSON, Markdown, LaTeX and HTML."""
