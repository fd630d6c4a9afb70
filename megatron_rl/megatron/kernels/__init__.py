"""Kernels for a GPU in place of several operations of torch each; none of them knows Megatron-core."""
