"""Measures what the tests see: changes the core in one place at a time, and runs the tests that reach the place.

The sample of a seed depends on the text of the core alone. First the tests run once in a copy of the tree that notes
which test reaches which sampled place (mutants_probe.py). Then each change is made in a copy, and the tests that reach
it run until one fails: those that failed for changes of the same file first, then the quickest.

Changes that no test can see, such as those of speed, stand in mutants_equivalent.yaml, each with the reason.
"""

import argparse
import compileall
import hashlib
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml
from mutants_places import Finder, Mutant

ROOT = Path(__file__).parents[2]
CORE = ("training", "batches", "recipes", "engines/pool", "refit", "config", "algorithms")
ELSEWHERE = ("nixl_transport.py",)  # files whose tests need packages that .venv lacks (make test-more ONLY=nixl)
RANKS = [f"tests/multi/test_{name}.py" for name in ("loop", "scatter", "refit", "refit_tcp", "world")]
# Tests of the sources' text and of times fail for any change or by chance; the others are long, and of other packages.
LEFT_OUT = (
    "layering", "docs", "equal_time", "hostile_graders", "hostile_locks", "grading", "sandbox", "api_rewards",
    "eval_measures", "embedded", "doctor_status", "report",
)  # fmt: skip
PRELOADED = ("torch", "numpy", "pydantic", "pyarrow.parquet", "hypothesis", "transformers", "megatron.core")
FIRST = 25  # tests of a change that run before the files of the others are read
TESTS_S, LIMIT_S = 60.0, 150.0  # of a change: seconds that its tests take when nothing is changed, and its time limit
SLOWER, TRIES = 2.5, 3  # see `judge`
BAR = 0.97


class Result(NamedTuple):
    """How the tests of a change ended: "killed", "too slow" (counts as killed) or "survived"."""

    end: str = "survived"
    test: str = ""  # that failed
    tests: int = 0  # that reach it
    seconds: float = 0.0


def sample(seed: int, count: int, listed: set[str]) -> list[Mutant]:
    """Returns the changes whose hashes with the seed are least, so that a new line of code hardly moves the sample."""
    files = [path for package in CORE for path in sorted((ROOT / "megatron_rl" / package).glob("*.py"))]
    files = [path for path in files if path.name not in ELSEWHERE]
    found = [m for path in files for m in Finder(str(path.relative_to(ROOT)), path.read_bytes()).found]
    chosen = sorted(found, key=lambda m: hashlib.blake2b(f"{seed} {m.key}".encode()).digest())
    chosen = [m for m in chosen if m.key not in listed][:count]
    gone = ", ".join(sorted(listed - {m.key for m in found}))
    print(
        f"{len(found)} changes are possible, {len(chosen)} are the sample of seed {seed}, {len(listed)} are equivalent"
    )
    print(f"Take out of mutants_equivalent.yaml what is no longer in the code: {gone}" if gone else "", flush=True)
    return sorted(chosen, key=lambda m: (m.file, m.start))


def copied(to: Path, mutants: Sequence[Mutant] = ()) -> Path:
    """Copies the tree without what git ignores, with notes of these changes. Compiled files are checked by content."""
    listing = ["git", "ls-files", "-zco", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for file in {m.file for m in mutants}:
        text = (to / file).read_bytes()
        notes = {(at, note.format(n)) for n, m in enumerate(mutants) if m.file == file for at, note in m.probes}
        for at, note in sorted(notes, reverse=True):
            text = text[:at] + note.encode() + text[at:]
        (to / file).write_bytes(text)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(to / "megatron_rl", quiet=2, invalidation_mode=mode)
    return to


def tested(tree: Path, words: Sequence[str], log: Path, limit_s: float, **variables: str) -> int:
    """Runs pytest in a tree, in a fork of this process, which has imported the slow libraries. Ends whatever the tests
    leave behind. Returns the exit status, -1 when the time limit came first."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.chdir(tree)
        sys.path[:0] = paths = [str(tree), str(tree / "tests/mutants")]
        os.environ.update(variables, PYTHONPATH=os.pathsep.join(paths))
        sys.modules["__main__"] = ModuleType("__main__")  # processes that the tests start would import this file
        os._exit(pytest.main(["-q", "-p", "no:cacheprovider", f"--basetemp={log}.tmp", *words]))
    end = time.monotonic() + limit_s
    while not (ended := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    shutil.rmtree(f"{log}.tmp", ignore_errors=True)
    return os.waitstatus_to_exitcode(status) if ended else -1


def reach(tree: Path, files: Sequence[str], log: Path) -> tuple[dict[str, float], list[tuple[int, str]]]:
    """Runs files of tests in the tree with notes. Returns the seconds of those that passed, and who reached what."""
    for name in (hits := f"{log}.hits", f"{hits}.test", f"{hits}.times"):
        Path(name).touch()
    tested(tree, ["-p", "mutants_probe", *files], log, 3600, MUTANTS_HITS=hits)
    rows = [line.split("\t", 2) for line in Path(f"{hits}.times").read_text().splitlines()]
    seconds, failed = Counter[str](), {test for _, outcome, test in rows if outcome != "passed"}
    for spent, _, test in rows:
        seconds[test] += float(spent)  # type: ignore[assignment]
    places = [line.split("\t", 1) for line in Path(hits).read_text().splitlines()]
    return {t: s for t, s in seconds.items() if t not in failed}, [(int(n), test) for n, test in places]


def judge(mutant: Mutant, tests: Sequence[str], home: Path) -> Result:
    """Makes a change in this process's tree and runs its tests.

    What fails with the change runs again without it, as a test may fail, or a time limit come, because of the machine's
    load alone. Tests that fail again are left out, and the others run once more. A change is too slow if its tests take
    SLOWER times as long as they do without it. After TRIES attempts the change counts as one that survived.
    """
    tree, log, begun = home / f"tree{os.getpid()}", home / f"log{os.getpid()}", time.monotonic()
    if not tree.exists():
        shutil.copytree(home / "clean", tree)
    text, end, failing = (tree / mutant.file).read_bytes(), "survived", ""
    changed = text[: mutant.start] + mutant.new.encode() + text[mutant.end :]
    for attempt in range(TRIES):
        limit_s = LIMIT_S * 2**attempt
        (tree / mutant.file).write_bytes(changed)
        status, ran, failing = first_failure(tree, tests, log, limit_s)
        (tree / mutant.file).write_bytes(text)
        if not status:
            break
        suspects, again = [failing] if failing else ran, time.monotonic()
        holds = tested(tree, ["-x", *suspects], log, 4 * limit_s) == 0
        if holds and (status > 0 or SLOWER * (time.monotonic() - again) < limit_s):
            end = "killed" if status > 0 else "too slow"
            break
        if not holds:
            tests = [test for test in tests if not test.startswith(tuple(suspects))]
    return Result(end, failing if end == "killed" else "", len(tests), time.monotonic() - begun)


def first_failure(tree: Path, tests: Sequence[str], log: Path, limit_s: float) -> tuple[int, Sequence[str], str]:
    """Runs the FIRST tests and then the others until one fails. Returns pytest's exit status (see `tested`), the tests
    that it ran on, and the name of the test that failed, or "" if pytest did not name it."""
    for part in (tests[:FIRST], tests[FIRST:]):
        status = tested(tree, ["-x", *part], log, limit_s) if part else 0
        said = log.read_text(errors="replace").splitlines() if status else []
        failing = next((line for line in said if line.startswith(("FAILED", "ERROR tests"))), "")
        if status == pytest.ExitCode.USAGE_ERROR and not failing:  # a test that was not found has not failed
            status = 0
        if status:
            return status, part, failing.removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0]
    return 0, tests, ""


def who_reaches(mutants: Sequence[Mutant], home: Path, pool: ProcessPoolExecutor) -> list[dict[str, float]]:
    """Returns for each change the tests that reach it, with their seconds."""
    tree, begun = copied(home / "noted", mutants), time.monotonic()
    folders = (ROOT / "tests/unit", ROOT / "tests/contrib")
    files = [str(p.relative_to(ROOT)) for folder in folders for p in sorted(folder.rglob("test_*.py"))] + RANKS
    files = [f for f in files if not any(f"test_{name}" in f for name in LEFT_OUT)]
    shares = [pool.submit(reach, tree, files[i::16], home / f"reach{i}") for i in range(min(16, len(files)))]
    found = [share.result() for share in shares]
    seconds = {test: spent for own, _ in found for test, spent in own.items()}
    reached: list[dict[str, float]] = [{} for _ in mutants]
    for number, test in (row for _, rows in found for row in rows if row[1] in seconds):
        reached[number][test] = seconds[test]
    for own in (own for m, own in zip(mutants, reached, strict=True) if m.kind == "default"):
        own |= {test: spent for test, spent in seconds.items() if "_defaults.py" in test}  # they read signatures
    print(f"{len(seconds)} tests, run in {time.monotonic() - begun:.0f} s, reach {sum(map(bool, reached))} of them\n")
    return reached


def judged(mutants: Sequence[Mutant], reached: Sequence[dict[str, float]], home: Path, pool: ProcessPoolExecutor,
           workers: int) -> list[Result]:  # fmt: skip
    """Gives every change its tests, first those that failed for others of its file, then the quickest."""
    copied(home / "clean")
    results, killers = [Result()] * len(mutants), defaultdict[str, Counter[str]](Counter)
    waiting, running = list(range(len(mutants)))[::-1], dict[Future[Result], int]()
    while waiting or running:
        while waiting and len(running) < workers:
            number = waiting.pop()
            known, seconds = killers[mutants[number].file], reached[number]
            order = sorted(seconds, key=lambda test: (-known[test], seconds[test]))
            while sum(seconds[test] for test in order) > TESTS_S:
                order.pop()
            running[pool.submit(judge, mutants[number], order, home)] = number
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            found, mutant = done.result(), mutants[number := running.pop(done)]
            results[number] = found
            killers[mutant.file][found.test] += 1
            print(f"{found.end:8} {found.seconds:5.1f} s  {mutant.key}  {found.test}", flush=True)
    return results


def report(mutants: Sequence[Mutant], results: Sequence[Result]) -> float:
    """Prints the changes by kind and the survivors. Returns the share that is killed."""
    ends = Counter((m.kind, r.end) for m, r in zip(mutants, results, strict=True))
    print("\n| kind | killed | too slow | survived |\n| --- | --- | --- | --- |")
    for kind in sorted({m.kind for m in mutants}):
        print(f"| {kind} | " + " | ".join(str(ends[kind, end]) for end in ("killed", "too slow", "survived")) + " |")
    alive = [(m, r) for m, r in zip(mutants, results, strict=True) if r.end == "survived"]
    print(f"\n{1 - len(alive) / len(mutants):.1%} of {len(mutants)} changes are killed; the bar is {BAR:.0%}.")
    for mutant, result in alive:
        print(f"survived {result.tests} tests: line {mutant.line} of {mutant.key}")
    return 1 - len(alive) / len(mutants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, default=0, help="another seed is another sample")
    parser.add_argument("--count", type=int, default=150, help="changes of the sample")
    parser.add_argument("--workers", type=int, default=2, help="changes that are tried at once")
    options = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    equivalent = yaml.safe_load((ROOT / "tests/mutants/mutants_equivalent.yaml").read_text()) or {}
    mutants = sample(options.seed, options.count, set(equivalent))
    with tempfile.TemporaryDirectory() as home, ProcessPoolExecutor(options.workers, get_context("fork")) as pool:
        reached = who_reaches(mutants, Path(home), pool)
        share = report(mutants, judged(mutants, reached, Path(home), pool, options.workers))
    sys.exit(share < BAR)


if __name__ == "__main__":
    main()
