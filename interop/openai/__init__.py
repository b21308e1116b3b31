"""OpenAI's API. Each agent of the network appears as a model."""
