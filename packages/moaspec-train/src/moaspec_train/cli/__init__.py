"""Commands of training data and training."""
