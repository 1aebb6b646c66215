"""Sampling parameters, noise, grammars and stop strings."""
