"""What decoding needs without PyTorch: requests, drafting policies, sampling, chat, commands."""
