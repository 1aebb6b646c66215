"""OpenAI's endpoints: bodies, answers, tool calls."""
