"""Reports of a training run: plan, notes, log, history and model card."""
