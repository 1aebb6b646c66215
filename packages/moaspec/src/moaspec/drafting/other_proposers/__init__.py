"""Proposers other than that of a Mixture-of-Attentions drafter."""
