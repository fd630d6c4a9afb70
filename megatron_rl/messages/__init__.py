"""What ranks tell each other, and how it is encoded."""
