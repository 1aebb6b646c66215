"""What a target says about tokens: its names, rules and generation defaults."""
