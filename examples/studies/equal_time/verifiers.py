"""The models that arms begin with: how many supervised steps a verifier has had, of what size and on which texts, and a
generator whose errors no verifier has seen."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples/miniatures/last_letter")]

import run as last_letter  # noqa: E402  (examples/miniatures/last_letter/run.py)
import task  # noqa: E402
from teachers import MAX_STEPS, make_problem, teacher_solution, verification_text  # noqa: E402

from examples.studies.equal_time.together import EACH, HEAD, TAIL  # noqa: E402
from megatron_rl.texts.tags import step_texts  # noqa: E402
from megatron_rl.texts.text import fill  # noqa: E402

FULL = 400  # supervised steps of the verifier in the regimes
PAIR_STEPS = 700  # of the one that judges pairs
PAIRED = 0.7  # share of its texts that are about two solutions
LAYERS = {"one_layer": 1, "two_layers": 2}  # of small verifiers; the generator has three


def plain(base: Path, stages: last_letter.Stages, *, steps: int = FULL) -> Path:
    """Returns the verifier of the regimes, `base` being a's directory, or one of fewer supervised steps."""
    return trained(base, "verifier" if steps == FULL else f"verifier{steps}", "verifier", steps, stages)


def small(base: Path, name: str, stages: last_letter.Stages) -> Path:
    """Returns a verifier of fewer layers: it learns solutions first, as the generator does, and then to judge."""
    task.write_model(base / f"task/{name}", last_letter.SFT_SEED, layers=LAYERS[name])
    solver = trained(base, f"generator_{name}", "generator", FULL, stages, start=base / f"task/{name}")
    return trained(base, f"verifier_{name}", "verifier", FULL, stages, start=solver)


def of_pairs(base: Path, stages: last_letter.Stages) -> Path:
    """Returns a verifier that judges two solutions in one text, and one alone."""
    pool = pq.read_table(base / "pool/train.parquet").to_pylist()
    write_pairs(base / "task/verifier_pairs_sft.jsonl", pool, last_letter.SFT_SEED + 7)
    return trained(base, "verifier_pairs", "verifier_pairs", PAIR_STEPS, stages)


def drifted(base: Path, regime: task.Regime, stages: last_letter.Stages) -> Path:
    """Returns a generator with another misconception than the one that verifiers learned from: it takes the letter
    before the last. `base`: the directory of its regime."""
    texts = base / "task/generator_drifted_sft.jsonl"
    task.write_generator_pairs(texts, regime, last_letter.SFT_SEED + 5, place=-2)
    return trained(base, "generator_drifted", "generator_drifted", FULL, stages, start=base / "task/model")


VERIFIERS: dict[str, Callable[[Path, last_letter.Stages], Path]] = {
    "pairs": of_pairs,
    **{name: lambda base, stages, name=name: small(base, name, stages) for name in LAYERS},
}


def trained(
    base: Path, name: str, texts: str, steps: int, stages: last_letter.Stages, *, start: Path | None = None
) -> Path:
    """Returns the model of a supervised run, which is made where it is not there yet."""
    if not (base / name / "model/model.safetensors").exists():
        settings: Sequence[str] = last_letter.sft(base, texts, start or base / "generator/model", steps)
        stages.command(f"SFT of {name}, {steps} steps", "sft", *settings, f"run.name={name}")
    return base / name / "model"


def write_pairs(path: Path, pool: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Writes texts that judge one or two solutions of a problem, for `PAIR_STEPS` steps. For half of the problems one
    solution is the generator's, from `pool`; all others are a noisy teacher's."""
    rng, regime, rows = random.Random(seed), task.regimes()["a"], []
    for _ in range(PAIR_STEPS * task.BATCH):
        problem = rng.choice(pool) if rng.random() < 0.5 else make_problem(rng, regime.sft)
        count = 2 if rng.random() < PAIRED else 1
        solutions = [teacher_solution(rng, problem["words"], 0.35 if rng.random() < 0.6 else 0.0) for _ in range(count)]
        if "response" in problem:
            solutions[rng.randrange(count)] = problem["response"]
        steps = [str(max(1, min(len(step_texts(s)), MAX_STEPS))) for s in solutions]
        prompt = fill(HEAD, question=problem["question"])
        prompt += "".join(fill(EACH, solution=s, num_steps=n) for s, n in zip(solutions, steps, strict=True))
        answers = [verification_text(rng, problem["words"], s, task.MISREAD) for s in solutions]
        rows.append({"prompt": prompt + TAIL, "response": " ".join(answers)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
