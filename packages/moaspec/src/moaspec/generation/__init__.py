"""The public functions that decode: `generate`, `stream`, sessions, transformers' hook."""
