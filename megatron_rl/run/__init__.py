"""Writes what a run leaves on disk and on the screen: its directory, checkpoints, metrics and console lines."""
