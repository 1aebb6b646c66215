"""What the terminal shows: tables, panes, progress."""
