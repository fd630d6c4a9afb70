"""Weights from one form into another: Hugging Face directories, Megatron checkpoints, other layouts."""
