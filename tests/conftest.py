"""Fixtures of several tests: last-letter models that can play, made once by the program itself, and a Slurm cluster."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from emulated_server import Server
from forks import environment  # noqa: F401 (tests import it from here)
from limits import RUN_S
from slurm_cluster import Cluster, missing_commands

ROOT = Path(__file__).parent.parent
os.umask(0o022)  # as the program does: a run directory that others may write to is refused
UNIT = sorted(path for path in (ROOT / "tests/unit").iterdir() if path.is_dir())
sys.path[:0] = [str(ROOT / "examples/miniatures/last_letter"), *map(str, UNIT)]
# what has libraries compute as on another processor (tests/processors): a job has an environment of its own
MASKED = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "NPY_DISABLE_CPU_FEATURES", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE")
MASKS = {name: os.environ[name] for name in MASKED if name in os.environ}
PROFILE = f"""
time: "00:30:00"
warning_s: 120
ranks_per_node: 1
gpus_per_node: 0
cpus_per_rank: 1
exclusive: true
environment: {json.dumps({"OMP_NUM_THREADS": "1", **MASKS})}
python: {sys.executable}
"""
torch.set_num_threads(1)  # tiny tensors: a thread pool only adds waiting


def pytest_collection_finish(session: pytest.Session) -> None:
    """All modules are imported now. The collector need not walk them after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_ranks_left() -> Iterator[None]:
    """A test that leaves this process a rank of something changes what the tests after it see."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left this process a rank of a process group")


def program(*arguments: str, timeout_s: float = RUN_S, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs `megatron-rl *arguments` from the repository's root, as a user does, where forks are possible in a process
    that has imported it already."""
    with tempfile.TemporaryDirectory() as directory:
        done = forks.program([*map(str, arguments)], Path(directory), timeout_s)
    if check:
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="session")
def last_letter(tmp_path_factory) -> Path:
    """task/, generator/model and verifier/model: a short SFT, enough for rewards to differ within a group.

    Suites that run at once share it, where MEGATRON_RL_TEST_SHARED names a directory: the first one makes it.
    """
    shared = os.environ.get("MEGATRON_RL_TEST_SHARED")
    base = Path(shared) / "last_letter" if shared else tmp_path_factory.mktemp("last_letter")
    base.mkdir(exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "made").exists():
            _make_last_letter(base)
            (base / "made").touch()
    return base


@pytest.fixture(scope="session")
def emulated(tmp_path_factory) -> Iterator[Server]:
    """Runs cases on a pretended CUDA device."""
    server = Server(tmp_path_factory.mktemp("emulated"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def fused(tmp_path_factory) -> Iterator[Server]:
    """The same with a stand-in for Transformer Engine."""
    server = Server(tmp_path_factory.mktemp("fused"), packages=ROOT / "tests/te_standin")
    yield server
    server.close()


def _make_last_letter(base: Path) -> None:
    import json
    import random

    import task
    from teachers import ProblemSizes, make_problem, teacher_solution

    sizes = ProblemSizes((2, 3), (2, 3), alphabet=6)
    regime = task.Regime(0.35, sizes, sizes, sizes, sizes, 0.3, 1e-3, 1, 3, 1e-3)
    task.write_model(base / "task/model", 0, heads=2)  # vLLM wants heads of 32 on a CPU
    task.write_problems(base / "task/test.jsonl", sizes, 32, 1)
    task.write_problems(base / "task/train.jsonl", sizes, 200, 2)
    task.write_generator_pairs(base / "task/generator_sft.jsonl", regime, 3, clean_steps=150, noisy_steps=20)
    rng = random.Random(4)
    pool = []
    for _ in range(200):
        problem = make_problem(rng, sizes)
        pool.append({**problem, "response": teacher_solution(rng, problem["words"], 0.35)})
    task.write_verifier_pairs(base / "task/verifier_sft.jsonl", regime, pool, 5, steps=100)
    for name, start, steps in (("generator", "task/model", 170), ("verifier", "generator/model", 100)):
        program(
            "sft", "examples/miniatures/last_letter/sft.yaml", f"model.path={base}/{start}",
            f"data.train={base}/task/{name}_sft.jsonl",
            f"steps={steps}", f"optimizer.decay_steps={steps}", f"run.name={name}", f"run.dir={base}", "launch.nproc=1",
        )  # fmt: skip
        rows = [
            json.loads(line)["metrics"]["loss"] for line in (base / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert rows[-1] < 0.5 * rows[0]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[Cluster]:
    """Four nodes with eight GPUs each that exist by name only.

    A test that crashes nodes or leaves jobs calls `reset` at its end.
    """
    if missing := missing_commands():
        pytest.skip(f"no Slurm: {', '.join(missing)} not found; `make slurm` installs it, or says why it cannot")
    with Cluster(tmp_path_factory.mktemp("slurm") / "mini") as cluster:
        yield cluster


@pytest.fixture
def site(slurm, tmp_path):
    """The cluster, with a profile for it."""
    path = tmp_path / "site.yaml"
    path.write_text(PROFILE)
    yield slurm, path
    slurm.reset()


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Commands of Slurm's that answer what `answers` says, and a list of what they were asked."""
    commands, log = tmp_path / "slurm", tmp_path / "asked"
    commands.mkdir()
    log.touch()

    def answers(**bodies: str) -> None:
        for name, body in bodies.items():
            (commands / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{log}\n{body}\n')
            (commands / name).chmod(0o755)

    answers(sbatch="echo 17", squeue="", scancel="")
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    return answers, lambda: log.read_text().splitlines()


def tango_settings(base: Path, out: Path, name: str) -> list[str]:
    """Arguments of a small Tango run on the fixture's models: 2 ranks, a verifier warm-up, one cycle, a checkpoint
    after each step.
    """
    return [
        "examples/miniatures/last_letter/tango.yaml", f"roles.generator.model.path={base}/generator/model",
        f"roles.verifier.model.path={base}/verifier/model", f"data.path={base}/task/train.jsonl",
        f"evaluation.sets=[{{path: {base}/task/test.jsonl, settings: last_letter}}]",
        "evaluation.limit=32", "evaluation.every=1",
        "recipe.args.generator_updates=5", "recipe.args.warmup_updates=1", "recipe.args.balanced_per_class=8",
        "run.prompts_per_iteration=8", "run.save_every=1", f"run.dir={out}", f"run.name={name}",
    ]  # fmt: skip
