"""Training rows: read, written by the target, compared with evaluation sets."""
