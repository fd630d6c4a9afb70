"""Slurm: the jobs of a run, what they leave in its directory for each other, and the limits they run under."""
