"""Settings of a run: their schema, how files are read, and what is checked before anything starts."""
