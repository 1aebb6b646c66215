"""What decoding needs without PyTorch: requests, drafting policies, sampling, chat, commands."""

__version__ = "0.1.0"
