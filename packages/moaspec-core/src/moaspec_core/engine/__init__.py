"""The loop over requests, and their states and results."""
