"""Runs as Slurm jobs: submitting, looking after and diagnosing them."""
