"""Runs the command-line program: `python -m megatron_rl` is equivalent to `megatron-rl`."""

import sys

from megatron_rl.main import program

if __name__ == "__main__":
    sys.exit(program())
