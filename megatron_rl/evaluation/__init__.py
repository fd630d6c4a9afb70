"""Measures trained models: benchmarks, estimators, hand-off, legibility, verifiers, and the reports about them."""
