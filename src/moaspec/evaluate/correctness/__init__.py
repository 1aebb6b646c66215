"""Whether texts are the target's own, and whether answers are right."""
