"""The training loop: turns, the player that makes rollouts, the gate, and the way of a batch to the ranks."""
