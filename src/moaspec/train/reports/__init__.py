"""What a run tells of itself: its plan, notes, log, history and model card."""
