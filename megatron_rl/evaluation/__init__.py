"""Measures trained models: benchmarks, estimators, hand-off, legibility and verifiers."""
