"""The tiny Tango runs of a soak: models of one layer that speak a few words, and the settings of a run of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "clock"  # its sitecustomize.py shifts the clock
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]
import cut_runs  # noqa: E402

SOLVER = "solver"
SPEECH = ["<eos>", "a", "b", "c", "<step>a</step>", "<step>b</step>"]
PROMPTS, SAMPLES = 4, 3  # of an iteration; of a problem
REPLICAS = 2  # servers of a role
CYCLE = 4  # iterations: three of the generator, one of the verifier
SAVE_CYCLES = 4  # between two checkpoints; of a short run one
SHORT = 100  # iterations
REQUEST_S = 4.0  # what a server that drips costs


def write_models(base: Path) -> None:
    """Writes the two models, their prompts and the problems. What is there already is kept."""
    if (base / "made").exists():
        return
    base.mkdir(parents=True, exist_ok=True)
    cut_runs.write_players(base)
    cut_runs.write_speakers(base, [SOLVER], SPEECH)
    cut_runs.write_data(base, [])
    (base / "made").touch()


def settings(base: Path, runs: Path, name: str, iterations: int, *, python: Path | None = None) -> dict[str, Any]:
    """Returns the config of a run of so many iterations, in the directory runs/name.

    It has two ranks with the embedded engine; with `python`, a program that starts servers, one rank and two servers
    of each role.
    """
    cycles = iterations // CYCLE
    args = {
        "generator_updates": max(1, 3 * cycles), "warmup_updates": iterations - CYCLE * cycles, "group_size": SAMPLES,
        "verifications": SAMPLES, "alpha_start": 0.5, "generator_template": f"{base}/plain.txt",
        "verifier_template": f"{base}/turns.txt",
    }  # fmt: skip
    roles = {
        "generator": cut_runs.role(base, model=SOLVER, lr=1e-3, loss={"kl_coef": 0.001}),
        "verifier": cut_runs.role(base, model=cut_runs.VERIFIER, lr=1e-3, sampling={"max_tokens": 2}),
    }
    parts = {
        "dir": str(runs), "prompts_per_iteration": PROMPTS,
        "save_every": 1 if iterations < SHORT else CYCLE * SAVE_CYCLES,
        "deterministic": True, "async_save": True, "train_without_signal": True, "hang_after_s": 120.0,
    }  # fmt: skip
    target = "megatron_rl.recipes.tango:Tango"
    config = cut_runs.config(base, name, target, roles, args=args, reward="begins_well", **parts)
    if python is not None:
        config["launch"] = {"nproc": 1}
        config["refit"] = {"timeout_s": 20.0, "message_timeout_s": 10.0}
        config["engine"] = {
            "kind": "vllm", "python": str(python), "replicas": REPLICAS, "request_timeout_s": REQUEST_S, "attempts": 10,
            "lost_after_s": 6.0, "restarts": 100_000, "max_sequences": 16,
        }  # fmt: skip
    return config


def write_python(path: Path) -> Path:
    """Writes a program that takes the place of the interpreter with vLLM: it starts a server of soaking/servers.py."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("servers.py")} "$@"\n')
    path.chmod(0o755)
    return path


def write_settings(file: Path, config: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config))
    return file
