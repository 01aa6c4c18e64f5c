"""The one page that a reader of the results opens, and the artifact's own claims."""
