"""Formats of weights: GGUF, LoRA adapters, quantised checkpoints, int8 rows."""
