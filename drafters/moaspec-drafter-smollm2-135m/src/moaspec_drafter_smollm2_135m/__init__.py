"""Drafters for SmolLM2-135M-Instruct; a directory each."""
