"""Runs cases on the pretended CUDA device: one process has imported all that they need, and each runs in a fork of it.

A case is a function of emulated_cases.py. It gets the directory of its own and its arguments, and returns what JSON
can hold; the ledger's report comes back beside it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from limits import RUN_S

from megatron_rl.run.parent_death import end_with_parent

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *(
        ROOT,
        ROOT / "tests/helpers",
        ROOT / "tests/emulated",
        ROOT / "tests/multi",
        ROOT / "examples/miniatures/last_letter",
    ),
    ROOT / "benchmarks",
    ROOT / "tools/gpu_kit",
)


@dataclass(frozen=True)
class Outcome:
    """The result of a case, by rank."""

    answers: list[Any]
    reports: list[dict[str, Any]]

    @property
    def waits(self) -> list[list]:
        """Returns [part, what, where, count] of all ranks, see Ledger.report."""
        return [wait for report in self.reports for wait in report["waits"]]

    @property
    def kernels(self) -> dict[str, int]:
        """Returns the number of kernels of each part on the first rank."""
        return self.reports[0]["kernels"]


class Server:
    """The process that runs the cases. What it was asked before it does not run again."""

    def __init__(self, directory: Path, *, packages: Path | None = None, triton: bool = False) -> None:
        """Starts the process. `packages`: a folder with packages that it finds beside those of the environment.
        `triton`: its kernels run, by its interpreter."""
        self._directory, self._done, self._numbers = directory, dict[str, Outcome](), itertools.count()
        folders = [*FOLDERS, *([] if packages is None else [packages])]
        environment = (
            os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(map(str, folders)),
                "HF_HUB_OFFLINE": "1",
            }
            | ({"TRITON_INTERPRET": "1"} if triton else {})
        )
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip

    def run(self, case: str, /, *, ranks: int = 1, **arguments: Any) -> Outcome:
        """Runs a case on so many ranks. Fails with the output of a rank that failed."""
        key = json.dumps([case, ranks, arguments], sort_keys=True, default=str)
        if key not in self._done:
            own = self._directory / f"{next(self._numbers)}-{case}"
            own.mkdir()
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps([case, ranks, str(own), arguments], default=str) + "\n")
            self._process.stdin.flush()
            failed = self._process.stdout.readline().strip()
            logs = [log for rank in range(ranks) if (log := own / f"rank{rank}.log").exists()]
            said = "".join(log.read_text()[-5000:] for log in logs)
            assert failed == "done", f"{case} {arguments}: {failed or 'the server has ended'}\n{said}"
            found = [json.loads((own / f"rank{rank}.json").read_text()) for rank in range(ranks)]
            self._done[key] = Outcome([one["answer"] for one in found], [one["report"] for one in found])
        return self._done[key]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # it waits for requests, and has nothing to finish
        self._process.wait()


def serve(directory: Path) -> None:
    """Answers requests until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import emulated_cuda
    import transformers  # noqa: F401 (it looks for a GPU when it is imported)

    emulated_cuda.install()
    import emulated_cases  # noqa: F401 (for the forks)

    if os.environ.get("TRITON_INTERPRET") == "1":
        _try_kernels()
    # Writers of checkpoints report to a process that takes two seconds to start: all cases share one.
    reports = SyncManager(ctx=multiprocessing.get_context("spawn"))
    reports.start(end_with_parent, (signal.SIGKILL, os.getpid()))
    for line in sys.stdin:
        case, ranks, own, arguments = json.loads(line)
        answers.write(_run_ranks(case, ranks, Path(own), arguments, reports) + "\n")
        answers.flush()


def _try_kernels() -> None:
    """Has the Triton kernels tried in a fork of their own: each process would do it for itself, which takes seconds."""
    from megatron_rl.megatron.kernels import choice, trial

    process = os.fork()
    if process == 0:
        problem = choice.obstacle()
        print(problem or "the kernels compute what they should", file=sys.stderr)
        os._exit(0 if problem is None else 1)
    assert os.waitpid(process, 0)[1] == 0, "the trial of the kernels fails on the pretended device"
    trial.trouble = lambda device: None


def _run_ranks(case: str, ranks: int, own: Path, arguments: dict[str, Any], reports: SyncManager) -> str:
    """Runs a case in forks. Returns "done", or a sentence."""
    processes: dict[int, int] = {}
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            _in_fork(case, rank, ranks, own, arguments, reports)
        processes[process] = rank
    end, problem = time.monotonic() + RUN_S, ""
    while processes:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in processes:
            rank = processes.pop(process)
            problem = problem or ("" if status == 0 else f"rank {rank} failed")
        elif time.monotonic() > end:
            problem = problem or f"ranks {sorted(processes.values())} were not done after {RUN_S} s"
        else:
            time.sleep(0.01)
        for other in processes if problem else ():
            os.kill(other, 9)
            os.waitpid(other, 0)
        processes = {} if problem else processes
    return problem or "done"


def _in_fork(case: str, rank: int, ranks: int, own: Path, arguments: dict[str, Any], reports: SyncManager) -> None:
    """Runs a case in this process, which ends."""
    import emulated_cases
    from emulated_device import LEDGER

    from megatron_rl.megatron import checkpoint_writers

    with open(own / f"rank{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        checkpoint_writers.share_manager(reports)
        answer = emulated_cases.run(case, rank, ranks, own, arguments)
        (own / f"rank{rank}.json").write_text(json.dumps({"answer": answer, "report": LEDGER.report()}))
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
