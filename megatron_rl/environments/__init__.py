"""Environments with several turns: their base class, the playing of episodes, tools, and adapters to libraries."""
