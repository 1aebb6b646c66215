"""OpenAI's endpoints below /v1/responses, and the responses that they keep."""
