"""Chat templates: rendering messages, and reading tool calls back."""
