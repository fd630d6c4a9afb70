"""What a step of `megatron-rl train` costs beside generating, grading, training and refitting; what Tango costs beside GRPO.

Starts short real runs on the last-letter models (made once, as by examples/last_letter/run.py) and watches their metrics.jsonl: a turn's
wall time is that between its line and the one before, its phases are those in its line, so the first turn does not count. With
--engines vllm the trainer is one rank, and the servers are started by `megatron-rl serve`, as in a job of their own, pinned to cores.
One turn after the other: no two servers share a core; with two cores Tango's generator has the trainer's, which waits while it works: the
verifier's server has more to do.
With turns played beside training: the trainer has a core of its own, and the servers share the others.

    overhead         share of the turns' wall time in no phase but these: rollout, review, reward, train, refit
    tango_over_grpo  mean wall time of an update in a Tango run (of either role) over that of an update in a GRPO run, same generator
    overlap          with rollouts.max_staleness 1: wall time of a turn over max(its generation and grading, its training and refit)

Figures with `_cpu` are of CPU-seconds of the trainer and its servers, which neighbours on the machine disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import common
import psutil

from megatron_rl.metrics import Row, read_metrics

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/last_letter"
PLAYING, LEARNING = ("rollout", "review", "reward"), ("train", "refit")
HEADS = 2  # vLLM's attention on a CPU wants heads of 32 at least
LOOK_S = 0.01
SERVE_END_S = 60.0
LONG_S = 5.0  # a step that the bar on the overhead is for
BARS = {"overhead": 0.03, "overlap": 1.15}
GOAL = {"tango_over_grpo": 1.5}  # with engines on a core of their own


@dataclass(frozen=True)
class Seen:
    """A turn of a run."""

    wall_s: float
    cpu_s: float  # of all processes of the run
    row: Row

    def of(self, phases: Sequence[str]) -> float:
        return sum(self.row.time.get(phase, 0.0) for phase in phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=None, help="embedded, vllm or both, with a comma (default: vllm where --python exists)")
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm/bin/python"), help="interpreter that has vLLM (make engines)")
    parser.add_argument("--models", type=Path, default=ROOT / f"runs/last_letter_{HEADS}_heads/a", help="made when there are none")
    parser.add_argument("--prompts", type=int, default=256, help="of a turn")
    parser.add_argument(
        "--turns", type=int, default=9, help="of the generator, in each run; of Tango's every fourth turn is the verifier's"
    )
    parser.add_argument("--staleness", default="0,1", help="values of rollouts.max_staleness, with vLLM (default: %(default)s)")
    common.add_arguments(parser)
    args = parser.parse_args()
    engines = args.engines.split(",") if args.engines else ["embedded", *(["vllm"] if Path(args.python).exists() else [])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    _prepare(args.models)
    figures: dict[str, float] = {}
    for engine in engines:
        for staleness in map(int, args.staleness.split(",")) if engine == "vllm" else (0,):
            with tempfile.TemporaryDirectory() as folder:
                seen = {arm: watch(arm, engine, staleness, Path(folder), args) for arm in ("grpo", "tango")}
            prefix = f"{engine}/" if staleness == 0 else f"{engine}, staleness {staleness}/"
            figures |= {prefix + name: value for name, value in (serial(seen) if staleness == 0 else overlapped(seen)).items()}
    limits = {name: limit for name in figures for end, limit in BARS.items() if name.endswith(f"_{end}") or name.endswith(f"/{end}")}
    limits |= {f"vllm/{name}": limit for name, limit in GOAL.items() if f"vllm/{name}" in figures}
    common.finish(figures, {}, args, limits={name: limit for name, limit in limits.items() if _counts(name, figures)})


def serial(seen: Mapping[str, Sequence[Seen]]) -> dict[str, float]:
    """Of runs whose turns are one after the other."""
    out: dict[str, float] = {}
    for arm, turns in seen.items():
        wall = sum(turn.wall_s for turn in turns)
        out[f"{arm}_turn_s"] = wall / len(turns)
        for phase in (*PLAYING, *LEARNING):
            out[f"{arm}_{phase}_share"] = sum(turn.of([phase]) for turn in turns) / wall
        out[f"{arm}_overhead"] = 1 - sum(turn.of(PLAYING + LEARNING) for turn in turns) / wall
    out["tango_over_grpo"] = fmean(t.wall_s for t in seen["tango"]) / fmean(t.wall_s for t in seen["grpo"])
    out["tango_over_grpo_cpu"] = fmean(t.cpu_s for t in seen["tango"]) / fmean(t.cpu_s for t in seen["grpo"])
    return out


def overlapped(seen: Mapping[str, Sequence[Seen]]) -> dict[str, float]:
    """Of runs that play a turn while another is trained on."""
    out: dict[str, float] = {}
    for arm, turns in seen.items():
        turns = turns[1:]  # before the second there was nothing to play beside
        out[f"{arm}_turn_s"] = fmean(turn.wall_s for turn in turns)
        out[f"{arm}_playing_s"] = fmean(turn.of(PLAYING) for turn in turns)
        out[f"{arm}_learning_s"] = fmean(turn.of(LEARNING) for turn in turns)
        out[f"{arm}_overlap"] = out[f"{arm}_turn_s"] / max(out[f"{arm}_playing_s"], out[f"{arm}_learning_s"])
    return out


def watch(arm: str, engine: str, staleness: int, folder: Path, args: argparse.Namespace) -> list[Seen]:
    """Runs `arm` and returns its turns but the first."""
    cores = sorted(os.sched_getaffinity(0))
    apart = engine == "vllm" and len(cores) > 1
    settings = [*_settings(arm, args), f"run.dir={folder}", f"run.name={arm}", f"rollouts.max_staleness={staleness}"]
    if engine == "vllm":
        settings += ["launch.nproc=1", "engine.kind=vllm", f"engine.python={args.python}", "engine.start=false"]
    roles = ("generator",) if arm == "grpo" else ("generator", "verifier")
    with contextlib.ExitStack() as stack:
        children = []
        if engine == "vllm":
            for number, role in enumerate(roles, 1):
                command = ["serve", *settings, f"--role={role}"]
                own = [cores[(len(roles) - number + 1) % len(cores)]] if staleness == 0 else cores[1:]
                children.append(stack.enter_context(_started(command, folder / f"serve_{role}.log", own if apart else cores)))
        trainer = stack.enter_context(_started(["train", *settings], folder / "train.log", cores[:1] if apart else cores))
        children.append(trainer)
        stamps = [*_stamps(folder / arm, trainer, [child.pid for child in children])]
    if trainer.returncode:
        raise RuntimeError(f"megatron-rl train ended with status {trainer.returncode}:\n{(folder / 'train.log').read_text()[-3000:]}")
    rows = read_metrics(folder / arm)
    return [Seen(b[0] - a[0], b[1] - a[1], row) for a, b, row in zip(stamps, stamps[1:], rows[1:], strict=False)]


def _stamps(run: Path, trainer: subprocess.Popen[bytes], processes: Sequence[int]) -> Iterator[tuple[float, float]]:
    """When each line of metrics.jsonl came, and the CPU-seconds spent until then."""
    known = 0
    while True:
        ended = trainer.poll() is not None
        lines = (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0
        for _ in range(known, lines):
            yield time.perf_counter(), common.cpu_seconds(processes)
        known = lines
        if ended:
            return
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _started(words: Sequence[str], log: Path, cores: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-m", "megatron_rl.main", *words], stdout=out, stderr=out, cwd=ROOT)
    psutil.Process(child.pid).cpu_affinity(list(cores))
    try:
        yield child
    finally:
        child.terminate()
        child.wait(SERVE_END_S)


def _settings(arm: str, args: argparse.Namespace) -> list[str]:
    updates = {"grpo": ["recipe.args.updates"], "tango": ["recipe.args.generator_updates"]}[arm]
    settings = [
        str(EXAMPLE / f"{arm}.yaml"), f"roles.generator.model.path={args.models}/generator/model", "evaluation.prompts=null",
        f"data.path={args.models}/task/train.jsonl", f"run.prompts_per_step={args.prompts}", "run.save_every=0", "gate.enabled=false",
        *(f"{name}={args.turns}" for name in updates),
    ]  # fmt: skip
    if arm == "tango":
        settings += [f"roles.verifier.model.path={args.models}/verifier/model", "recipe.args.warmup_updates=0"]
    return settings


def _prepare(models: Path) -> None:
    sys.path[:0] = [str(EXAMPLE)]
    import run

    with contextlib.chdir(ROOT):
        run.prepare(models, models.name, run.Stages(), heads=HEADS)


def _counts(name: str, figures: Mapping[str, float]) -> bool:
    """Whether a bar is for it: that on the overhead is for long steps."""
    return not name.endswith("_overhead") or figures[name.replace("_overhead", "_turn_s")] >= LONG_S


if __name__ == "__main__":
    main()
