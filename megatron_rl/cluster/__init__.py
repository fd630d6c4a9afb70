"""Support for running under Slurm: job scripts, time limits, addresses, and the log of a run's starts."""
