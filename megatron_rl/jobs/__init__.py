"""Submits runs as Slurm jobs, shows their status, and checks their hosts."""
