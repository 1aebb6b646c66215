"""Output in the terminal: tables, panes, progress."""
