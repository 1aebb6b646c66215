"""Measures and stores the costs of a round's parts on this machine."""
