"""Estimates a run's memory and time from its config and a cluster's name. It is arithmetic: no torch, no ranks."""
