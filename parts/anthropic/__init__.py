"""The Messages API, as Anthropic's clients and the agents that use them expect it."""
