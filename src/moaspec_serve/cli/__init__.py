"""`moaspec serve`."""
