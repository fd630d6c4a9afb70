"""Prints the progress of a command while it starts, one line per step, so that the user sees the reason of each wait.

Only `sys` is imported here, so that the first line is printed before slow imports.
"""

import sys

# Commands that print progress to standard output. Other commands reserve standard output for their result.
RUNS = ("train", "drift", "sft")


def tell(command: str, text: str) -> None:
    """Prints a progress line of a command and flushes it."""
    print(f"megatron-rl {command}: {text}", file=sys.stdout if command in RUNS else sys.stderr, flush=True)
