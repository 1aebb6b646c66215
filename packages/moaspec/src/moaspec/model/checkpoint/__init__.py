"""Drafter checkpoints on disk."""
