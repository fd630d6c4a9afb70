"""Helpers that know nothing of models: files, processes, threads, time."""
