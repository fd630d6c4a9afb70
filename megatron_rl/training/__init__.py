"""The training loop: iterations, the collector that generates rollouts, the preflight checks, and the scatter of
batches to the ranks.
"""
