"""Names and layouts of Hugging Face tensors against Megatron parameters (pure)."""
