"""The Python API for training: the names that `from megatron_rl import ...` provides."""
