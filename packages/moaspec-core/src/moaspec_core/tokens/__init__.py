"""Facts of a target about tokens: its names, rules and generation defaults."""
