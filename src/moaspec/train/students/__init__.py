"""What is trained: students, their losses, and the target activations that they learn from."""
