"""Tells what a command does while it starts, one line for each part, so that no wait is silent.

Nothing is imported here: the first line of a command is printed before anything that takes time.
"""

import sys

RUNS = ("train", "drift", "sft")  # commands whose console writes to standard output; others keep it for their result


def tell(command: str, text: str) -> None:
    """Prints a line, at once."""
    print(f"megatron-rl {command}: {text}", file=sys.stdout if command in RUNS else sys.stderr, flush=True)
