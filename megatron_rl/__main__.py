"""Runs the program: `python -m megatron_rl` is `megatron-rl`."""

import sys

from megatron_rl.main import program

if __name__ == "__main__":
    sys.exit(program())
