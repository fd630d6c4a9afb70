"""Makes the directory of a small run, damages copies of it, and reads them with all that reads such directories."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from talks import CALLING, keep_talks, say, talk

from megatron_rl.cluster import job_slices
from megatron_rl.cluster.slurm_job import SlurmJob
from megatron_rl.config.schema import ConfigError, Run
from megatron_rl.jobs import status
from megatron_rl.report.pages import write_report
from megatron_rl.run import json_lines
from megatron_rl.run.checkpoint import Checkpoints, write_json
from megatron_rl.run.metrics import Tracker
from megatron_rl.run.run_directory import RunError, open_run
from megatron_rl.session import run_record
from megatron_rl.training.iteration import Iteration
from megatron_rl.training.store import IterationStore

CONFIG = "run: {seed: 1, iterations: 4}\nrecipe: {target: 'a:b', args: {x: 1.0}}\n"
ITERATION = Iteration(cycle=0, index=0, roles=("solver",), number=0)
JOB = SlurmJob(id="17", restart=0, node="n0", step=None, end=None, warning_s=None)
Change = Callable[[bytes], bytes]


def make_run(directory: Path) -> Path:
    """Returns the directory of a run of four iterations, with every file that readers look at."""
    run = keep_talks(directory, CONFIG, solver=[talk(*CALLING, rewards={"outcome": 1.0}), talk(*CALLING)])
    tracker = Tracker(run.metrics)
    for iteration in range(4):
        cells = {f"confusion/{cell}": 2.0 + iteration for cell in ("tp", "fp", "tn", "fn")}
        tracker.log(iteration, "solver", {"loss": 0.1 * iteration, "seconds/train": 1.0, **cells}, iteration=iteration)
        tracker.log(iteration, "eval", {"solver/accuracy": 0.2 * iteration}, iteration=iteration)
        json_lines.append(
            run.refits, json.dumps({"role": "solver", "version": iteration, "refit/seconds": 0.5}).encode()
        )
        work = [[iteration, "solver", "training", iteration + 0.25, iteration + 0.75]]
        sets = [{"ranks": "0-1", "roles": ["solver"], "busy": 0.5}]
        line = {"iteration": iteration, "began": iteration, "ended": iteration + 1, "sets": sets, "intervals": work}
        json_lines.append(run.timeline, json.dumps(line).encode())
    run.update_summary({"planned": 4, "finished": True, "accuracy_start": 0.1, "accuracy_end": 0.6})
    job_slices.begin(run.path, JOB, "n0", 3)
    job_slices._append(
        run.path, job_slices.Slice(job="17", restart=0, nodes="n0", began=1.0, iterations_before=0, ended=2.0)
    )
    Checkpoints(run.checkpoints).write(2, lambda place: write_json(place / "state.json", {"progress": {}}))
    return run.path


def flip(intact: Path, target: Path, changes: Mapping[str, Change], *, rng: random.Random | None = None) -> Path:
    """Returns a copy of a run at `target`, with some files changed; with `rng` one file more, in a random way."""
    shutil.copytree(intact, target)
    for name, change in changes.items():
        (target / name).write_bytes(change((target / name).read_bytes()))
    if rng is not None:
        file = rng.choice(sorted(path for path in target.rglob("*") if path.is_file()))
        file.write_bytes(damaged(file.read_bytes(), rng))
    return target


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Returns some bytes as a killed process, a full disk, a bad block or a hand might leave them."""
    place = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40))) + data[place:]
        case 2:
            return data[:place] + b"\0" * (len(data) - place)
        case 3:
            if place == len(data):
                return b""
            return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        case 4:
            return data + data[place:]
        case 5:
            return data[:place] + data[place + rng.randrange(1, 60) :]
        case 6:
            rows = data.split(b"\n")
            rng.shuffle(rows)
            return b"\n".join(rows)
    numbers = [b"NaN", b"null", b"-1", b"1e999", b'"x"', b"[]", b"{}", b"1" * 400, b"true"]
    digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
    if not digits:
        return b""
    at = rng.choice(digits)
    return data[:at] + rng.choice(numbers) + data[at + 1 :]


def look(run: Path, *, page: bool = False) -> list[str]:
    """Reads a run with all that reads its directory; whatever is raised is a defect, except refusals to go on with it.
    Returns what the readers said of its damage."""
    record = run_record.RunRecord(run)
    record.metrics(), record.each_refit(lambda line: None), record.summary(), record.config(), record.config_text()
    for path in record.iteration_files():
        record.rollouts(path)
    try:
        shown = status.read(run, look_s=0, jobs=[])
        assert shown.iterations >= 0
        status.show(shown, _Silent())
    except ConfigError:  # neither a config nor jobs are there
        pass
    job_slices.read(run, alive=False), job_slices.finished(run), job_slices.iterations_done(run)
    job_slices.begin(run, SlurmJob(id="18", restart=0, node="n0", step=None, end=None, warning_s=None), "n0", 3)
    if page:
        write_report(run)
    Checkpoints(run / "checkpoints").newest()
    Tracker(run / "metrics.jsonl").truncate(2)
    with contextlib.suppress(RunError):
        open_run(Run(dir=str(run.parent), name=run.name), CONFIG)
    store = IterationStore(run / "rollouts", decode=say)
    store.get(ITERATION)
    store.clean(0)
    return record.damage


class _Silent:
    def print(self, *args: object) -> None:
        return None
