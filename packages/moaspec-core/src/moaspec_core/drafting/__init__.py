"""Draft trees, their shapes, n-gram drafts, and the protocols of those who draft and verify."""
