"""Training and log-prob computation with Megatron-core. This is the only package that imports megatron.core."""
