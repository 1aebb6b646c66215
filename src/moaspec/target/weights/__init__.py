"""How weights are read and kept: GGUF, adapters, quantised checkpoints, eight bits."""
