"""What a run will need and how long it will take, from its config and a cluster's name: arithmetic, no torch, no ranks."""
