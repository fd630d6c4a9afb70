"""Converts weights between Hugging Face directories and Megatron checkpoints, and recuts checkpoints."""
