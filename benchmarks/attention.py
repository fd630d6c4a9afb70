"""Compares ways to attend to bfloat16 on a CPU: as it is, and in float32 (megatron/attention.py).

One thread; 9 heads of 64 elements and 3 for keys and values, causal; so many sequences that they have 2,304 tokens, or
a few less. Milliseconds of CPU time, the fastest of several rounds that alternate. The metric that counts is the
backward pass in bfloat16 over that in float32, the conversions included: above 1, float32 is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import common
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, GROUPS, SIZE = 2304, 9, 3, 64
LENGTHS = (48, 72, 128, 200, 300, 384, 512)
BARS = {f"{length}/backward": 1.0 for length in LENGTHS if length < 384}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def as_it_is(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def widened(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return as_it_is(query.float(), key.float(), value.float()).to(query.dtype)


def passes(attend: Attend, inputs: list[Tensor]) -> tuple[float, float]:
    """Returns the CPU-seconds of a forward and a backward pass."""
    start = time.process_time()
    attended = attend(*inputs)
    middle = time.process_time()
    attended.backward(torch.ones_like(attended))
    return middle - start, time.process_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    for length in LENGTHS:
        shape = (max(1, TOKENS // length), length, SIZE)
        inputs = [
            torch.randn(shape[0], heads, *shape[1:], dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        for attend in (as_it_is, widened):
            passes(attend, inputs)
        rounds = [(passes(as_it_is, inputs), passes(widened, inputs)) for _ in range(args.rounds)]
        for number, name in enumerate(("forward", "backward")):
            narrow, wide = (min(seconds[side][number] for seconds in rounds) for side in (0, 1))
            metrics[f"{length}/{name}_ms_bfloat16"], metrics[f"{length}/{name}_ms_float32"] = 1e3 * narrow, 1e3 * wide
            metrics[f"{length}/{name}"] = narrow / wide
    common.finish(metrics, BARS, args)


if __name__ == "__main__":
    main()
