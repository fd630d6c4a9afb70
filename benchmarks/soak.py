"""Soaks a tiny Tango run in faults, for thousands of iterations, and looks at what they leave behind.

Three runs of models of one layer, one after the other:

    calm    two ranks, embedded engine, no fault: what the second is compared with
    struck  the same, whose ranks and launcher are killed at random, whose disk fills twice and whose
            wall clock jumps; it is started again by the same command
    served  one rank and four servers without a model (vLLM's routes, real refits) that drop, drip, garble and lie
            (NaN, log-probs above 0, ids out of the vocabulary) at random; servers and reward workers are killed all the
            time, a supervisor and the trainer near the end

--iterations is the number of iterations of `struck` and `served` together, half each; `calm` has as many as `struck`.

    differing lines     of metrics.jsonl without its times, `struck` against `calm`, and model files that differ
    lost prompts        of iterations that are missing, doubled or without all their answers
    lies believed       tokens of `served` that no server wrote so
    slopes              what a process gains an iteration behind its first 200 of them: the median over all pairs of
                        samples. Memory is anonymous and shared memory; pages of files do not count
    leftovers           when a run has ended: processes, files in /dev/shm and in the folder for temporary files,
                        half-written files in the run's directory; and ranks that outlived their launcher

As root everything happens in a mount namespace, with a /dev/shm and a small disk of its own. Otherwise the disk's
faults are limits of a file's size, and what others leave in /dev/shm meanwhile counts too. A run that is finished is
not done again by the same command: see OUT/RUN.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import psutil
import pyarrow.parquet as pq
from soaking import faults, runs, watch
from soaking.faults import Fault, World

from megatron_rl.run.metrics import read_metrics
from megatron_rl.training import rollout_parquet
from megatron_rl.training.store import ROLLOUTS, iteration_files, read_rows

ROOT = Path(__file__).parent.parent
RUNS = ("calm", "struck", "served")
INSIDE = "MEGATRON_RL_SOAK_INSIDE"  # set within the namespace
SHM = Path("/dev/shm")
LOOK_S, END_S = 0.1, 45.0  # END_S: from the end of a launcher to that of the last process under it
STALLED_S = 900.0  # without an iteration: the soak gives up; servers that die in a row are away for up to five minutes
UNPLANNED = 3  # ends that no fault explains, after which the soak gives up
LATE = 0.8  # share of the iterations from which on supervisors and trainers of `served` are killed
LAST = 0.9  # share of the iterations of `struck` before which all its faults are due
BARS = {"KiB": 1.0, "descriptors": 1.0, "threads": 1.0}  # an iteration; in 1,000 iterations
POLICY_WROTE = 0


@dataclass
class Told:
    """What happened to a run."""

    struck: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    unplanned: int = 0  # ends without a fault
    unmade: int = 0  # faults that were planned and found nothing to strike
    outlived: int = 0  # processes that had to be ended after their launcher
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Soak:
    """One of the runs, and where its things are."""

    name: str
    iterations: int
    out: Path
    disk: Path
    world: World
    environment: dict[str, str]

    @property
    def run(self) -> Path:
        return self.disk / self.name

    @property
    def folders(self) -> tuple[Path, ...]:
        """Returns where nothing may be left."""
        return SHM, Path(self.environment["TMPDIR"])


def main() -> None:
    args = _arguments()
    folder = args.out.resolve()
    _enter_namespace(folder, args.disk_mib)
    runs.write_models(folder / "models")
    results: dict[str, dict[str, Any]] = {}
    for name in args.runs.split(","):
        file, iterations = folder / f"{name}.json", max(runs.CYCLE, args.iterations // 2)
        summary = json.loads(file.read_text()) if file.exists() else {}
        request = {"iterations": iterations} | {
            option: getattr(args, option) for option in ("seed", "kills", "fills", "share")
        }
        if summary.get("asked") != request:
            summary = {"asked": request} | _one(name, iterations, folder, args)
            file.write_text(json.dumps(summary, indent=1) + "\n")
        results[name] = summary
    metrics, limits = _figures(results, folder)
    common.finish(metrics, {}, args, limits=limits)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--iterations", type=int, default=2000, help="of `struck` and `served` together (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults' kinds and times")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/soak", help="what is kept (default: runs/soak)")
    parser.add_argument("--runs", default=",".join(RUNS), help="those that are done (default: %(default)s)")
    parser.add_argument("--kills", type=int, help="SIGKILLs in `struck` (default: one in 50 iterations)")
    parser.add_argument("--fills", type=int, default=2, help="times that the disk fills (default: 2)")
    parser.add_argument("--share", type=float, default=0.02, help="of a server's answers that go wrong (default: 0.02)")
    parser.add_argument("--disk-mib", type=int, default=512, help="size of the disk, as root (default: 512)")
    common.add_arguments(parser)
    return parser.parse_args()


def _enter_namespace(folder: Path, disk_mib: int) -> None:
    """Starts this program anew with a /dev/shm and a disk that nobody else has, where that can be had."""
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    if INSIDE in os.environ or os.geteuid() or shutil.which("unshare") is None:
        return
    mount = f'mount -t tmpfs soak {SHM} && mount -t tmpfs -o size={disk_mib}m soak "$0"'
    words = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*words, mount, folder / "disk"], capture_output=True, check=False).returncode:
        return
    again = [sys.executable, str(Path(__file__)), *sys.argv[1:]]
    os.execvpe("unshare", [*words, f'{mount} && exec "$@"', str(folder / "disk"), *again], os.environ | {INSIDE: "1"})


def _one(name: str, iterations: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Does one of the runs. Returns what is told of it, as JSON values."""
    soak = _opened(name, iterations, folder, args)
    names_before = set(watch.names_in(*soak.folders))
    report = Told()
    start = time.monotonic()
    try:
        _until_done(soak, _plan(soak, args), report)
    finally:
        report.seconds = time.monotonic() - start
        for process in watch.marked(soak.world.mark):  # also where the soak itself is interrupted
            with contextlib.suppress(psutil.Error):
                process.kill()
        _keep(soak)
    remaining = sorted(set(watch.names_in(*soak.folders)) - names_before)
    samples = watch.read_samples(soak.out / f"{name}_samples.jsonl")
    wrote = [
        json.loads(line)["kind"] for f in (folder / "faults").glob("*.jsonl") for line in f.read_text().splitlines()
    ]
    return {
        "iterations": iterations, "starts": report.starts, "unplanned": report.unplanned, "unmade": report.unmade,
        "outlived": report.outlived, "seconds": round(report.seconds, 1), "struck": dict(report.struck),
        "answers": dict(Counter(wrote)) if name == "served" else {}, "left": remaining,
        "half_written": watch.half_written(soak.run), "lost_prompts": _prompts_lost(soak.run, iterations),
        "lies_believed": _lies(soak.run) if name == "served" else 0, "models": _digests(soak.run),
        "slopes": watch.plain(watch.slopes(samples, iterations)),
    }  # fmt: skip


def _opened(name: str, iterations: int, target: Path, args: argparse.Namespace) -> Soak:
    """Makes the places of a run, and the environment that all its processes have."""
    folders = {part: target / part for part in ("tmp", "faults")}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    (target / f"{name}_samples.jsonl").unlink(missing_ok=True)
    shutil.rmtree(target / "disk" / name, ignore_errors=True)
    rng = random.Random(f"{args.seed}:{name}")
    world = World(
        mark=uuid.uuid4().hex, disk=target / "disk", own_disk=INSIDE in os.environ, clock=target / "clock", rng=rng
    )  # fmt: skip
    faults.set_clock(world.clock, 0.0)
    path = [str(ROOT), str(ROOT / "tests/helpers"), str(runs.SITE)]
    environment = os.environ | {
        watch.MARK: world.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(folders["tmp"]), "SOAK_CLOCK": str(world.clock), "SOAK_FAULTS": str(folders["faults"]),
        "SOAK_SHARE": str(args.share),
    }  # fmt: skip
    return Soak(
        name=name, iterations=iterations, out=target, disk=target / "disk", world=world, environment=environment
    )


def _plan(soak: Soak, args: argparse.Namespace) -> list[Fault]:
    """Draws the faults that are made from outside of a run."""
    rng, iterations = soak.world.rng, soak.iterations
    jumps = ("clock", max(1, iterations // 100))
    if soak.name == "calm":
        return []
    if soak.name == "struck":
        kills = max(1, iterations // 50) if args.kills is None else args.kills
        drawn = Counter([faults.KILLS[i % len(faults.KILLS)] for i in rng.sample(range(5 * kills), kills)])
        return faults.plan(rng, int(LAST * iterations), [*drawn.items(), ("disk", args.fills), jumps])
    early = faults.plan(
        rng,
        int(LATE * iterations),
        [("server", max(1, iterations // 40)), ("reward worker", max(1, iterations // 250)), jumps],
    )
    late = [Fault(int((LATE + share) * iterations), kind) for share, kind in ((0.0, "supervisor"), (0.06, "rank"))]
    return [*early, *late, Fault(int((LATE + 0.12) * iterations), "all")]


def _until_done(soak: Soak, planned: list[Fault], report: Told) -> None:
    """Starts the run again and again until it is done. Raises RuntimeError where it does not come to its end."""
    python = runs.write_python(soak.out / "python") if soak.name == "served" else None
    config = runs.settings(soak.out / "models", soak.disk, soak.name, soak.iterations, python=python)
    file = runs.write_settings(soak.out / f"{soak.name}.yaml", config)
    watched = watch.Watch(soak.out / f"{soak.name}_samples.jsonl", alone=python is not None)
    while True:
        report.starts += 1
        watched.begin()
        with _started(soak, file) as launcher:
            ended_by_fault = _attend(soak, launcher, watched, planned, report)
        for process in watch.gone(soak.world.mark, END_S):
            report.outlived += 1
            print(f"{soak.name}: outlived its launcher: {watch.words(process)}", file=sys.stderr, flush=True)
            process.kill()
        if launcher.returncode == 0:
            report.unmade = len(planned)
            return
        if not ended_by_fault:
            report.unplanned += 1
            print(f"{soak.name}: ended with status {launcher.returncode}, by no fault", file=sys.stderr, flush=True)
        if report.unplanned > UNPLANNED:
            raise RuntimeError(f"{soak.name} ended {report.unplanned} times without a fault: see {_log(soak)}")


def _attend(
    soak: Soak, launcher: psutil.Popen, watched: watch.Watch, planned: list[Fault], report: Told
) -> bool:  # fmt: skip
    """Watches one start of a run to its end and makes the faults that are due. Returns whether one of them ended it."""
    expected, most, since = False, -1, time.monotonic()
    while launcher.poll() is None:
        iteration = watch.last_iteration(soak.run)
        if iteration != most:
            most, since = iteration, time.monotonic()
        if time.monotonic() - since > STALLED_S:
            raise RuntimeError(
                f"{soak.name}: no iteration for {STALLED_S:.0f} s, at iteration {iteration}: see {_log(soak)}"
            )
        watched.look(launcher.pid, iteration)
        if planned and iteration >= planned[0].iteration and not expected:
            fault = planned[0]
            if faults.strike(fault, soak.world, watched, launcher, soak.run):
                del planned[0]
                _say(soak, f"iteration {iteration}: {fault.kind}")
                report.struck[fault.kind] += 1
                expected = fault.kind in faults.ENDS
        time.sleep(LOOK_S)
    return expected


@contextlib.contextmanager
def _started(soak: Soak, settings: Path) -> Iterator[psutil.Popen]:
    words = [sys.executable, "-m", "megatron_rl.main", "train", str(settings)]
    with _log(soak).open("ab") as log:
        launcher = psutil.Popen(
            words, cwd=ROOT, env=soak.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.kill()
        launcher.wait()


def _log(soak: Soak) -> Path:
    return soak.out / f"{soak.name}.log"


def _say(soak: Soak, text: str) -> None:
    with _log(soak).open("a") as log:
        log.write(f"--- {time.strftime('%H:%M:%S')} soak: {text}\n")


def _keep(soak: Soak) -> None:
    """Copies what tells of a run from its disk, which goes with the namespace."""
    kept = soak.out / "kept" / soak.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in ("metrics.jsonl", "refits.jsonl", "summary.json"):
        with contextlib.suppress(OSError):
            shutil.copy(soak.run / name, kept)
    with contextlib.suppress(OSError):
        shutil.copytree(soak.run / "logs", kept / "logs")


def _prompts_lost(run: Path, iterations: int) -> int:
    """Returns the number of prompts in iterations that are not there exactly once, or without all their answers."""
    seen = Counter(row.iteration for row in read_metrics(run))
    lost = sum(runs.PROMPTS for iteration in range(iterations) if seen[iteration] != 1)
    files = iteration_files(run / ROLLOUTS)
    for path in files:
        groups = Counter(row["group"] for row in read_rows(path))
        lost += runs.PROMPTS - sum(count == runs.SAMPLES for count in groups.values())
    return lost + runs.PROMPTS * max(0, iterations - len(files))


def _lies(run: Path) -> int:
    """Returns the number of sampled tokens with a log-prob that no server gives them (fake_vllm.logprob_of)."""
    wrong = 0
    for path in iteration_files(run / ROLLOUTS):
        for rollout in rollout_parquet.from_table(pq.read_table(path)):
            for start, end, author, *_ in rollout.spans.tolist():
                if author == POLICY_WROTE:
                    pairs = zip(rollout.tokens[start:end].tolist(), rollout.logprobs[start:end].tolist(), strict=True)
                    wrong += sum(logprob != -token / 128 for token, logprob in pairs)
    return wrong


def _digests(run: Path) -> dict[str, str]:
    paths = sorted((run / "models").glob("*/model*.safetensors"))
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _figures(results: dict[str, dict[str, Any]], folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics, and the bars that they must not be above."""
    metrics: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, summary in results.items():
        metrics |= {f"{name}: iterations": summary["iterations"], f"{name}: seconds": summary["seconds"]}
        metrics |= {f"{name}: starts": summary["starts"]} if name != "calm" else {}
        metrics |= {f"{name}: {kind} struck": count for kind, count in sorted(summary["struck"].items())}
        metrics |= {f"{name}: answers, {kind}": count for kind, count in sorted(summary["answers"].items())}
        zero = {
            "ends that no fault explains": summary["unplanned"], "lost prompts": summary["lost_prompts"],
            "left: processes": summary["outlived"], "left: /dev/shm, temporary files": len(summary["left"]),
            "left: half-written files": len(summary["half_written"]),
            "faults that could not be made": summary["unmade"],
        }  # fmt: skip
        zero |= {"lies believed": summary["lies_believed"]} if name == "served" else {}
        for what, value in zero.items():
            metrics[f"{name}: {what}"], limits[f"{name}: {what}"] = value, 0.0
        for process, slope in sorted(summary["slopes"].items()):
            for unit, value in (("KiB", slope["kib"]), *((u, slope[u]) for u in ("descriptors", "threads"))):
                metric = f"{name}: {process}, {unit} {'an iteration' if unit == 'KiB' else 'in 1,000 iterations'}"
                metrics[metric], limits[metric] = value, BARS[unit]
    if {"calm", "struck"} <= results.keys():
        lines = _differing(folder / "kept/calm", folder / "kept/struck")
        models = sum(results["calm"]["models"].get(n) != d for n, d in results["struck"]["models"].items())
        models += len(results["calm"]["models"].keys() - results["struck"]["models"].keys())
        for what, value in (("differing lines", lines), ("differing model files", models)):
            metrics[what], limits[what] = value, 0.0
    return metrics, limits


def _differing(calm: Path, struck: Path) -> int:
    """Returns the number of metric lines that two runs do not share, times aside."""
    first, second = ([(r.iteration, r.cycle, r.scope, r.metrics) for r in read_metrics(run)] for run in (calm, struck))
    return sum(a != b for a, b in zip(first, second, strict=False)) + abs(len(first) - len(second))


if __name__ == "__main__":
    main()
