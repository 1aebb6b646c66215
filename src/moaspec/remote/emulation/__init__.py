"""Emulated links: what a network does to messages, in this process."""
