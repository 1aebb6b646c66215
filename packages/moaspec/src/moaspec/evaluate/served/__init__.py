"""Other servers: what they write, and whether it is the model's own text."""
