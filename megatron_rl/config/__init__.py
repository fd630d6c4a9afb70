"""The settings of a run: their schema, the loading of config files, and the checks before a run starts."""
