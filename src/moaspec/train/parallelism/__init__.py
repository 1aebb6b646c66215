"""One training process or many, and how they share weights and optimiser state."""
