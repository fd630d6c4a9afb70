"""The output of a run on disk and on the screen: its directory, checkpoints, metrics and console lines."""
