"""Environments that models act in over several turns: their protocol, how episodes are played, tools, and adapters."""
