"""Modules that every package may use: limits, cache paths, optional packages, locks, ports."""
