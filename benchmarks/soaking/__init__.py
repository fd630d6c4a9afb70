"""The parts of benchmarks/soak.py: the tiny runs, their faults, servers that misbehave, and the watch over memory."""
