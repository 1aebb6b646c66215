"""Targets of any model type, through transformers' own modules and without code for one of them."""
