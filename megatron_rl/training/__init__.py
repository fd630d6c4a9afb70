"""The training loop: iterations, the collector that generates rollouts, the preflight checks before training, and the
scatter of rollouts to the ranks.
"""
