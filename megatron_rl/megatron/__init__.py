"""The Megatron-core actor: the only package that imports megatron.core."""
