"""Messages and chat templates: from a conversation to text, and from text to tool calls."""
