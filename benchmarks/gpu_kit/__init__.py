"""Measures training, rollouts, refits and sleep on one GPU, for benchmarks/gpu.py and tests/gpu."""
