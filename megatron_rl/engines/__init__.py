"""Rollout engines: the engine protocol and its implementations."""
