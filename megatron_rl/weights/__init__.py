"""Maps between Hugging Face tensors, Megatron parameters and engine parameters; reads and writes their files."""
