"""The parts of checkpoints that need no PyTorch: configuration, directories, user files."""
