"""Checks that texts are the target's own, and grading of answers."""
