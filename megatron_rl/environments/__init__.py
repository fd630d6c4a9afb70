"""Environments in which models act over several turns: the base class Environment, the playing of episodes, tools that
models call, and adapters to environment libraries."""
