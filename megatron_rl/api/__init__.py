"""Training from Python: what `from megatron_rl import ...` gives."""
