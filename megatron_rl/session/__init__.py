"""Opens, connects and closes the parts of a run: ranks, engines, servers and models."""
