"""Reports of measurements: summary, verdict, plots, Markdown and HTML."""
