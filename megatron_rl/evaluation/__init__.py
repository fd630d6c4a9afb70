"""Measuring trained models: benchmarks, estimators, hand-off, legibility, verifiers, and the report of it all."""
