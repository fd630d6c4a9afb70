"""Converts weights between Hugging Face directories and Megatron checkpoints, and reshards checkpoints."""
