"""Measures what the parts of a round cost on this machine, and stores it."""
