"""The drafter for Qwen2.5-Coder-0.5B-Instruct, in a directory."""
