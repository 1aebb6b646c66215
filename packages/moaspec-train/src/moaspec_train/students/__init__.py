"""Students (drafters in training), their losses and the target's activations."""
