"""Times the import of model directories into Megatron shards, and the export, against plain safetensors.

Both sides move the same bytes in one run. `tp1` is one rank's parameters. `tp4` is those of four ranks one after the
other, each reading only its slices: together the same bytes. Plain import copies every tensor of the file into memory
that exists already. `of_get_slice` compares with the same slices read by safetensors' own get_slice: nobody copies rows
of a few kilobytes as fast as whole tensors. Plain export saves whole tensors; ours joins them from the shards first.
Files are in the page cache, and each side counts with its fastest round. `extra_mib` is the most anonymous memory that
an import takes beyond the parameters that it fills.
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

from megatron_rl.models.sizes import Sizes
from megatron_rl.weights import hf_model, tensor_copies
from megatron_rl.weights.parameter_mapping import Shard, hf_shapes, megatron, megatron_names

BARS = {"import/tp1/ratio": 0.8, "import/tp4/ratio": 0.8}
LIMITS = {"import/tp1/extra_mib": 64, "import/tp4/extra_mib": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = {"hidden": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "ffn": 8192, "vocab": 32000}
    sizes = Sizes(family="qwen2", num_layers=args.layers, tied=False, **width)
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {n: torch.randn(s if s[1] > 1 else s[:1]).bfloat16() for n, s in hf_shapes(sizes).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        size = sum(t.nbytes for t in tensors.values())
        metrics["gigabytes"] = size / 1e9
        for tp in (1, 4):
            ranks = [parameters(sizes, Shard(tp, rank)) for rank in range(tp)]
            plain, sliced, ours = fastest_rounds(
                [
                    lambda: read_plain(folder, tensors),
                    lambda ranks=ranks: read_slices(folder, ranks),
                    lambda ranks=ranks: read_shards(folder, ranks),
                ],
                args.rounds,
            )
            metrics |= {f"import/tp{tp}/gb_per_s": size / ours / 1e9, f"import/tp{tp}/ratio": plain / ours}
            metrics[f"import/tp{tp}/of_get_slice"] = sliced / ours
            with common.AnonymousPeak() as peak:
                read_shards(folder, ranks)
            metrics[f"import/tp{tp}/extra_mib"] = peak.mib
            target = folder / "out"
            plain, ours = fastest_rounds(
                [lambda target=target: write_tensors(target, tensors), lambda r=ranks, o=target: write_shards(o, r)],
                args.rounds,
            )
            metrics |= {f"export/tp{tp}/gb_per_s": size / ours / 1e9, f"export/tp{tp}/ratio": plain / ours}
    common.finish(metrics, BARS, args, limits=LIMITS)


def parameters(sizes: Sizes, shard: Shard) -> list[tuple[torch.Tensor, list]]:
    """Returns (zeros, rectangles) of every parameter of a rank."""
    names = megatron_names(sizes, range(sizes.num_layers), (), first=True, last=True, fused=True)
    shapes = [megatron(sizes, name, shard) for name in names]
    return [
        (torch.zeros(shape[:1] if shape[1] == 1 else shape, dtype=torch.bfloat16), rects) for shape, rects in shapes
    ]


def read_shards(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    """Imports the parameters of all ranks along their rectangles."""
    for held in ranks:
        read = hf_model.DirectoryTensors(folder).read
        for parameter, rects in held:
            tensor_copies.fill(parameter, rects, read)


def read_slices(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    """Imports the same parameters by safetensors' own slices."""
    for held in ranks:
        with safe_open(folder / "model.safetensors", "pt") as file:
            for parameter, rects in held:
                for rect in rects:
                    rows = slice(rect.row, rect.row + rect.rows)
                    columns = slice(rect.column, rect.column + rect.columns)
                    stored = file.get_slice(rect.tensor)
                    tensor_copies.local(parameter, rect).copy_(
                        stored[rows] if parameter.dim() == 1 else stored[rows, columns]
                    )


def read_plain(folder: Path, into: dict[str, torch.Tensor]) -> None:
    """Copies every tensor of the directory."""
    for name, tensor in hf_model.read_tensors(folder):
        into[name].copy_(tensor)


def write_shards(folder: Path, ranks: list[list[tuple[torch.Tensor, list]]]) -> None:
    """Joins the whole tensors from the shards and saves them."""
    tensors: dict[str, torch.Tensor] = {}
    for parts in zip(*ranks, strict=True):
        replicated = len({tuple(rects) for _, rects in parts}) == 1  # every rank holds all of a norm
        tensors |= tensor_copies.assemble([parts[0]] if replicated else parts)
    write_tensors(folder, tensors)


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes whole tensors in one file."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def fastest_rounds(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Returns the seconds of each run's fastest round. Runs alternate, after a round that warms the page cache."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [min(times[1:]) for times in seconds]


if __name__ == "__main__":
    main()
