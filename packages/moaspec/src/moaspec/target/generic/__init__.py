"""Targets of any model type, by transformers' own modules, without code for a single type."""
