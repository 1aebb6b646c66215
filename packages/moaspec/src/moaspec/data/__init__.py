"""Conversations as data: how rows are read, normalised and rendered in a chat template."""
