"""Evaluation of trained models: benchmarks, statistics, hand-off, legibility, drift and verifiers."""
