"""Reading a model directory into Megatron shards along rectangles, against a plain safetensors read of the same bytes, in one run.

`tp1` fills the parameters of one rank; `tp4` those of four ranks one after the other, each reading only its slices: together the same
bytes. Plain: every tensor of the files read whole into memory that is there already. Both read from the page cache (a first pass warms
it), each side counts with its fastest round. The bar is 0.8 of the plain read.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
from safetensors.torch import save_file

from megatron_rl.weights import copies, hf
from megatron_rl.weights.rectangles import Shard, hf_shapes, megatron, megatron_names
from megatron_rl.weights.sizes import Sizes

BARS = {"tp1/ratio": 0.8, "tp4/ratio": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(
        family="qwen2", num_layers=args.layers, hidden=2048, heads=16, kv_heads=4, head_dim=128, ffn=8192, vocab=32000, tied=False
    )  # fmt: skip
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        tensors = {
            n: torch.randn(s).to(torch.bfloat16).squeeze(-1) if s[1] == 1 else torch.randn(s).bfloat16()
            for n, s in hf_shapes(sizes).items()
        }
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        size = sum(t.nbytes for t in tensors.values())
        plain = fastest(lambda: read_plain(Path(folder), tensors), args.rounds)
        figures["gigabytes"] = size / 1e9
        figures["plain_gb_per_s"] = size / plain / 1e9
        for tp in (1, 4):
            ranks = [parameters(sizes, Shard(tp, rank)) for rank in range(tp)]
            seconds = fastest(lambda ranks=ranks: read_shards(Path(folder), ranks), args.rounds)
            figures |= {f"tp{tp}/gb_per_s": size / seconds / 1e9, f"tp{tp}/ratio": plain / seconds}
    common.finish(figures, BARS, args)


def parameters(sizes: Sizes, shard: Shard) -> list[tuple[torch.Tensor, list]]:
    names = megatron_names(sizes, range(sizes.num_layers), (), first=True, last=True, fused=True)
    found = [megatron(sizes, name, shard) for name in names]
    return [(torch.zeros(shape[:1] if shape[1] == 1 else shape, dtype=torch.bfloat16), rects) for shape, rects in found]


def read_shards(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    for own in ranks:
        read = hf.Tensors(folder).read
        for parameter, rects in own:
            copies.fill(parameter, rects, read)


def read_plain(folder: Path, into: dict[str, torch.Tensor]) -> None:
    for name, tensor in hf.read_tensors(folder):
        into[name].copy_(tensor)


def fastest(run: Callable[[], None], rounds: int) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
