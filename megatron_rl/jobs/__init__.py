"""Submits runs as Slurm jobs, shows how they do, and diagnoses their hosts."""
