"""Rollout engines: a protocol and its adapters."""
