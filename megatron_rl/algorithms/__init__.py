"""Pure functions on tensors: advantages, schedules and losses."""
