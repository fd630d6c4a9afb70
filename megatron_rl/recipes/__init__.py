"""Training methods, one file each: which roles write, how they are rewarded, which role is trained when."""
