"""Training methods, one file each: who plays, how it is rewarded, whose turn it is."""
