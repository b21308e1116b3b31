"""OpenAI's API, with agents as models."""
