"""From rollouts to what a rank trains on: how they are cut, how they travel, and the packed batch that a loss sees."""
