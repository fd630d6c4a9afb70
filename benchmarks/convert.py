"""Times conversions of a synthetic model between Hugging Face and Megatron, in seconds per GB, with their peak memory.

The model is like Qwen2, of about 1 GB in bfloat16, with random numbers. Each direction runs in a process of its own.
`peak_mib` is the most anonymous memory beyond the interpreter's with everything imported. It may be 2 GiB and a shard,
whatever the model's size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import common
import torch

from megatron_rl.conversion import convert
from megatron_rl.conversion.weight_source import find, read_sizes
from megatron_rl.weights.hf_writer import HfWriter, Planned
from megatron_rl.weights.parameter_mapping import hf_shapes

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from compare_checkpoints import compare  # noqa: E402

LIMITS = {"to_megatron/peak_mib": 2048 + 250, "to_hf/peak_mib": 2048 + 250, "compare/peak_mib": 2048 + 250}
CONFIG = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; the feed-forward layers have 4 times it")
    parser.add_argument("--shard-gb", type=float, default=0.25)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary directory)")
    common.add_arguments(parser)
    args = parser.parse_args()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, context = Path(name), multiprocessing.get_context("spawn")
        size = write_model(folder / "model", args.layers, args.hidden)
        metrics |= {"gigabytes": size / 1e9, "largest_parameter_mib": 2 * CONFIG["vocab_size"] * args.hidden / 2**20}
        for what, first, second in (("to_megatron", "model", "ck"), ("to_hf", "ck", "back"), ("compare", "ck", "back")):
            with context.Pool(1) as pool:
                seconds, peak = pool.apply(measure, (what, folder / first, folder / second, int(args.shard_gb * 1e9)))
            metrics |= {f"{what}/s_per_gb": seconds / size * 1e9, f"{what}/peak_mib": peak}
    common.finish(metrics, {}, args, limits=LIMITS)


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """Writes a random model. Returns its bytes."""
    folder.mkdir()
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers, **sizes}))
    shapes = {name: s if s[1] > 1 else s[:1] for name, s in hf_shapes(read_sizes(folder)).items()}
    writer = HfWriter(folder, [Planned(name, shape, torch.bfloat16) for name, shape in shapes.items()])
    for name, shape in shapes.items():
        writer.write(name, torch.randn(shape).bfloat16())
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure(what: str, first: Path, second: Path, shard_bytes: int) -> tuple[float, float]:
    """Runs one conversion. Returns (seconds, peak MiB)."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    with common.AnonymousPeak() as peak:
        if what == "to_megatron":
            convert.to_megatron(find(first), second, file_bytes=shard_bytes)
        elif what == "to_hf":
            convert.to_hf(find(first), second, shard_bytes=shard_bytes)
        else:
            assert all(row["equal"] for row in compare(find(first), find(second)))
    return time.perf_counter() - start, peak.mib


if __name__ == "__main__":
    main()
