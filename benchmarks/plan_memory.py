"""Compares the memory that `megatron-rl plan` expects with what the actor allocates, for models of 75 M parameters.

    python benchmarks/plan_memory.py --check      # exits 1 when a part is off by more than 5 %, activations by 15 %

It runs on a CPU. Storages are counted, not sampled: parameters, gradient buffers, optimizer state, and what autograd
saves at its peak over one update. Every row is the worst rank of a layout of one or two ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from common import add_arguments, finish  # noqa: E402
from ranks import run_ranks  # noqa: E402
from tiny_models import make_model  # noqa: E402

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", SIZES | {"num_hidden_layers": 10}),  # 75 M parameters
    "experts": (
        "qwen3_moe",
        SIZES
        | {
            "num_hidden_layers": 4,
            "num_experts": 16,
            "moe_intermediate_size": 384,
            "num_experts_per_tok": 4,
            "head_dim": 64,
        },
    ),  # 76 M
}
SP = {"tp": 2, "sequence_parallel": True}
CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "dense", {}, {}),
    (1, "dense", {}, {"dtype": "bfloat16"}),
    (1, "dense", {}, {"recompute": "full"}),
    (1, "dense", {}, {"recompute": "selective", "modules": "mlp"}),
    (1, "dense", {}, {"recompute": "selective", "modules": "core_attn"}),
    (1, "dense", {}, {"prompt": 32, "group": 5}),
    (2, "dense", {"tp": 2}, {}),
    (2, "dense", SP, {}),
    (2, "dense", SP, {"recompute": "full"}),
    (2, "dense", {"pp": 2}, {}),
    (2, "dense", {}, {}),
    (1, "experts", {}, {}),
    (1, "experts", {}, {"recompute": "selective", "modules": "moe"}),
    (2, "experts", {"ep": 2}, {}),
    (2, "experts", SP, {}),
    (2, "experts", SP | {"ep": 2, "etp": 1}, {}),
]
LENGTHS = [64, 64, 48, 48, 32] * 2  # of 512 tokens
MICRO = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many cases (default: all)")
    add_arguments(parser)
    args = parser.parse_args()
    cases = CASES[: args.cases]
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in {case[1] for case in cases}:
            family, sizes = MODELS[model]
            make_model(folder / model, family, **sizes)
        for ranks in sorted({case[0] for case in cases}):
            selected = [case for case in cases if case[0] == ranks]
            file = folder / f"cases{ranks}.json"
            file.write_text(json.dumps([_case(folder, case) for case in selected]))
            answers = run_ranks(
                ROOT / "tests/helpers/plan_worker.py", ranks, folder / f"ranks{ranks}", str(file), timeout_s=1800
            )
            for number, case in enumerate(selected):
                metrics |= _errors(case, [answer[number] for answer in answers])
    limits = {what: 0.15 if what.endswith("activations") else 0.05 for what in metrics}
    finish(metrics, {}, args, limits=limits)


def _case(folder: Path, case: tuple[int, str, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    _, model, layout, kind = case
    modules = kind.get("modules", "core_attn").split()
    return {
        "model": str(folder / model),
        "layout": layout,
        "lengths": LENGTHS,
        "micro": MICRO,
        **kind,
        "modules": modules,
    }


def _errors(
    case: tuple[int, str, dict[str, Any], dict[str, Any]], answers: list[dict[str, dict[str, float]]]
) -> dict[str, float]:
    """Returns {case and part: the largest relative error over the ranks}.

    Activations are compared on the ranks' sum where experts are spread over ranks.
    """
    ranks, model, layout, kind = case
    words = [f"{axis}{size}" for axis, size in layout.items() if axis != "sequence_parallel"]
    notes = ["shared prompts"] if "group" in kind else [*kind.values()]
    label = " ".join([model, *(words or [f"dp{ranks}"]), *(["sp"] if "sequence_parallel" in layout else []), *notes])
    errors = {}
    for part in ("weights", "gradients", "optimizer", "activations"):
        pairs = [(answer["expected"][part], answer["found"][part]) for answer in answers]
        if part == "activations" and layout.get("ep", 1) > 1:  # routers send one rank more than the other
            pairs = [tuple(map(sum, zip(*pairs, strict=True)))]  # type: ignore[list-item]
        errors[f"{label}: {part}"] = max(abs(expected / measured - 1) for expected, measured in pairs)
    return errors


if __name__ == "__main__":
    main()
