"""Many servers as one engine: who is there (membership), where a request goes (dispatch), new weights (refits), all together (pool)."""
