"""The training loop: iterations, the collector that makes rollouts, the preflight, and the way of a batch to the
ranks."""
