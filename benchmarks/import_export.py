"""Model directories into Megatron shards along rectangles and back, against plain safetensors of the same bytes, in one run.

`tp1` is one rank's parameters; `tp4` those of four ranks one after the other, each reading only its slices: together the same bytes.
Plain import: every tensor of the file copied into memory that is there already. `get_slice`: the same slices into the same memory by
safetensors' own means; rows of a few kilobytes are not copied as fast as whole tensors by anybody. Plain export: the whole tensors saved;
ours joins them from the shards first. Files are in the page cache, each side counts with its fastest round. `extra_mib`: the most anonymous
memory that an import takes beyond the parameters that it fills.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import common
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.weights import copies, hf
from megatron_rl.weights.rectangles import Shard, hf_shapes, megatron, megatron_names
from megatron_rl.weights.sizes import Sizes

BARS = {"import/tp1/ratio": 0.8, "import/tp4/ratio": 0.8}
LIMITS = {"import/tp1/extra_mib": 64, "import/tp4/extra_mib": 64}


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {n: torch.randn(s if s[1] > 1 else s[:1]).bfloat16() for n, s in hf_shapes(sizes).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        size = sum(t.nbytes for t in tensors.values())
        figures["gigabytes"] = size / 1e9
        for tp in (1, 4):
            ranks = [parameters(sizes, Shard(tp, rank)) for rank in range(tp)]
            plain, sliced, ours = in_turn(
                [
                    lambda: read_plain(folder, tensors),
                    lambda ranks=ranks: read_slices(folder, ranks),
                    lambda ranks=ranks: read_shards(folder, ranks),
                ],
                args.rounds,
            )
            figures |= {f"import/tp{tp}/gb_per_s": size / ours / 1e9, f"import/tp{tp}/ratio": plain / ours}
            figures[f"import/tp{tp}/of_get_slice"] = sliced / ours
            with common.AnonymousPeak() as peak:
                read_shards(folder, ranks)
            figures[f"import/tp{tp}/extra_mib"] = peak.mib
            out = folder / "out"
            plain, ours = in_turn(
                [lambda out=out: hf.write_tensors(out, tensors), lambda r=ranks, o=out: write_shards(o, r)], args.rounds
            )
            figures |= {f"export/tp{tp}/gb_per_s": size / ours / 1e9, f"export/tp{tp}/ratio": plain / ours}
    common.finish(figures, BARS, args, limits=LIMITS)


def parameters(sizes: Sizes, shard: Shard) -> list[tuple[torch.Tensor, list]]:
    names = megatron_names(sizes, range(sizes.num_layers), (), first=True, last=True, fused=True)
    found = [megatron(sizes, name, shard) for name in names]
    return [(torch.zeros(shape[:1] if shape[1] == 1 else shape, dtype=torch.bfloat16), rects) for shape, rects in found]


def read_shards(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    for own in ranks:
        read = hf.DirectoryTensors(folder).read
        for parameter, rects in own:
            copies.fill(parameter, rects, read)


def read_slices(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    for own in ranks:
        with safe_open(folder / "model.safetensors", "pt") as file:
            for parameter, rects in own:
                for rect in rects:
                    rows, columns = (
                        slice(rect.row, rect.row + rect.rows),
                        slice(rect.column, rect.column + rect.columns),
                    )
                    found = file.get_slice(rect.tensor)
                    copies.local(parameter, rect).copy_(found[rows] if parameter.dim() == 1 else found[rows, columns])


def read_plain(folder: Path, into: dict[str, torch.Tensor]) -> None:
    for name, tensor in hf.read_tensors(folder):
        into[name].copy_(tensor)


def write_shards(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for parts in zip(*ranks, strict=True):
        whole = (
            [parts[0]] if len({tuple(rects) for _, rects in parts}) == 1 else parts
        )  # of a norm every rank holds all
        tensors |= copies.assemble(whole)
    hf.write_tensors(folder, tensors)


def in_turn(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The fastest round of each, all in turn, after a first round that warms the page cache."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [min(times[1:]) for times in seconds]


if __name__ == "__main__":
    main()
