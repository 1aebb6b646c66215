"""The report of `moaspec eval` as an HTML page and as Markdown, in a checkout of the repository."""
