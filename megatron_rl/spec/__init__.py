"""The specification of a run: what `resolve` makes of a config before anything starts, and all checks on it."""
