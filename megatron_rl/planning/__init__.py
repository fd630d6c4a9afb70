"""Estimates a run's memory and time from its config and the name of a cluster, with arithmetic only: no torch, no
ranks."""
