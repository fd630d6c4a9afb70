"""Runs on every rank: checkpoints that the tools wrote, loaded by megatron-core under several layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actor_worker import distance, make, weights
from layouts_worker import learn

from megatron_rl.config.schema import Layout
from megatron_rl.conversion.reshard import reshard
from megatron_rl.weights import hf_model
from megatron_rl.weights.rank_layouts import TrainerLayout


def imported(cases: list[dict[str, Any]]) -> dict[str, bool]:
    """A converted checkpoint gives every layout the weights of the Hugging Face directory, bit for bit, over other
    weights.
    """
    answers = {}
    for case in cases:
        expected = dict(hf_model.read_tensors(case["model"]))
        for layout in case["layouts"]:
            policy = make(case["other"], Layout(**layout), trainable=False)
            policy.state.load(Path(case["checkpoint"]))
            converted = weights(policy)
            answers[f"{case['name']}/{layout}"] = converted.keys() == expected.keys() and all(
                torch.equal(converted[n], expected[n]) for n in converted
            )
    return answers


def resharded(cases: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, float]]:
    """Two updates, save, cut anew, load under the target layout: the next update is that of the policy that went on."""
    answers = {}
    for case in cases:
        path = case["model"]
        first, second = Layout(**case["from"]), Layout(**case["to"])
        policy = make(path, first)
        for _ in range(2):
            learn(policy)
        saved, cut = folder / case["name"] / "saved", folder / case["name"] / "cut"
        if dist.get_rank() == 0:
            saved.mkdir(parents=True)
        dist.barrier()
        policy.state.save(saved)
        if dist.get_rank() == 0:
            reshard(saved, cut, TrainerLayout(tp=second.tp, pp=second.pp), model=Path(path))
        dist.barrier()
        reloaded = make(path, second)
        reloaded.state.load(cut)
        loaded = distance(weights(policy), weights(reloaded))
        a, b = learn(policy), learn(reloaded)
        gaps = {name: abs(a[name] - b[name]) for name in ("loss", "grad_norm", "lr")}
        answers[case["name"]] = {"loaded": loaded, **gaps, "after": distance(weights(policy), weights(reloaded))}
    return answers


def main() -> None:
    output_path, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = {
        "imported": imported(cases["imported"]),
        "resharded": resharded(cases["resharded"], output_path.parent / "resharded"),
    }
    output_path.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
