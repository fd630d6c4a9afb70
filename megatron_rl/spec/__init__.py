"""The specification of a run, which `resolve` builds from a config before anything starts, and all checks on it."""
