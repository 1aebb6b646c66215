"""The `moaspec` command: its commands, options and terminal output."""
