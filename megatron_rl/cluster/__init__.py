"""Adapts runs to Slurm: job scripts, time limits, addresses, and the record of a run's starts in its directory."""
