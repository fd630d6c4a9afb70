"""Writes the checkpoints of a run: the files of each policy on the policy's ranks, and the checkpoint on the driver."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.devices.allocator import return_free_pages
from megatron_rl.lib.user_code import one_line
from megatron_rl.messages.world import DriverError, World
from megatron_rl.run import json_lines
from megatron_rl.run.checkpoint import STATE, CheckpointError, Checkpoints, sum_up, write_json
from megatron_rl.session.run_setup import Driver


class Saves(Protocol):
    def save(self, directory: Path, *, background: bool = False) -> None: ...

    def saved(self, *, wait: bool) -> bool: ...


class PolicyFiles:
    """Writes the files of one policy into checkpoints. Every method is collective over the policy's ranks.

    In the background, training continues while the files are written and their checksums are computed.
    """

    def __init__(
        self, name: str, policy: Saves, world: World, checkpoints: Checkpoints,
        present: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        """`present`: function (name of a policy) -> context manager that keeps the policy's weights on the GPU while
        they are saved."""
        self._name, self._policy, self._world, self._present = name, policy, world, present
        self._checkpoints = checkpoints
        self._due: int | None = None  # number of the checkpoint whose files are being written; None if there is none
        # result of the thread that computes the checksums of the files that this rank wrote
        self._summing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "checksums")

    def save(self, number: int, *, background: bool) -> float | None:
        """Writes the policy's files of checkpoint `number`. Returns the seconds that this took, or None if they are
        written in the background."""
        start = time.monotonic()
        return_free_pages()  # frees memory before the writer processes are forked
        with refusing(self._checkpoints, number, self._world), self._present(self._name):
            self._policy.save(self._checkpoints.pending(number) / self._name, background=background)
        self._due = number
        if background:
            return None
        self.written(wait=True)
        return time.monotonic() - start

    def written(self, *, wait: bool) -> bool:
        """Returns whether all files that `save` began are written, with their checksums. With `wait`, waits for
        them."""
        if self._due is None:
            return True
        with refusing(self._checkpoints, self._due, self._world):
            if self._summing is None:
                if not self._world.everywhere(self._policy.saved(wait=wait)):
                    return False
                place = {self._name: self._world.rank}
                self._summing = self._thread.submit(sum_up, self._checkpoints.pending(self._due), place)
            if not wait and not self._world.everywhere(self._summing.done()):
                return False
            summing, self._due, self._summing = self._summing, None, None
            summing.result()
            self._world.barrier()
        return True


class Saver:
    """Saves checkpoints of a run that trains a single model on all ranks. Every method is collective.

    The first checkpoint is always written synchronously, because its duration is measured. From the duration the run
    decides how long before the time limit of a Slurm job it exits.
    """

    def __init__(self, world: World, driver: Driver, policy: Saves, *, background: bool) -> None:
        self._files = PolicyFiles("model", policy, world, driver.checkpoints)
        self._world, self._driver, self._background = world, driver, background
        self._due: int | None = None  # number of the checkpoint that is being written; None if there is none
        self._measured = False

    def save(self, number: int, state: Any) -> int | None:
        """Waits until the previous checkpoint is complete, then begins checkpoint `number`. `state`: JSON values that
        the checkpoint stores besides the model.

        Returns `number` if the checkpoint is complete, and None if its files are still being written in the background.
        """
        self.settle(wait=True)
        checkpoints, background = self._driver.checkpoints, self._background and self._measured
        start = time.monotonic()

        def begin() -> None:
            (checkpoints.begin(number) / "model").mkdir()
            write_json(checkpoints.pending(number) / STATE, state)

        with refusing(checkpoints, number, self._world):
            self._world.from_leader(begin)
        self._files.save(number, background=background)
        self._due = number
        if background:
            return None
        settled = self.settle(wait=True)
        self._driver.leave.saved(time.monotonic() - start)
        self._measured = True
        return settled

    def settle(self, *, wait: bool) -> int | None:
        """Commits the checkpoint that `save` began, if all its files are written. With `wait`, waits until they are
        written.

        Returns the checkpoint's number if this call committed it, otherwise None."""
        if self._due is None or not self._files.written(wait=wait):
            return None
        number, self._due = self._due, None
        with refusing(self._driver.checkpoints, number, self._world):
            self._world.from_leader(lambda: self._driver.checkpoints.commit(number) and None)
        return number


@contextlib.contextmanager
def refusing(checkpoints: Checkpoints, number: int, world: World | None = None) -> Iterator[None]:
    """Context manager for a block that writes checkpoint `number`. If writing fails, for example because the disk is
    full, deletes the incomplete checkpoint and raises CheckpointError.

    `world`: the ranks that run the block together, of which the first one deletes; None: the driver runs it alone."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        if isinstance(error, (CheckpointError, DriverError)):
            raise
        if world is None or world.rank == 0:
            shutil.rmtree(checkpoints.pending(number), ignore_errors=True)
        place = checkpoints.directory
        free = shutil.disk_usage(place).free
        raise CheckpointError(
            f"checkpoint {number} cannot be written to {place}, where {free / 1e9:.1f} GB are free "
            f"({one_line(_root(error))}): {json_lines.RESUME}"
        ) from error


def _root(error: BaseException) -> BaseException:
    """Returns the root cause of an error. For a CheckpointException, which collects the errors of several ranks,
    returns the root cause of the first error."""
    if isinstance(error, CheckpointException) and error.failures:
        return _root(next(iter(error.failures.values()))[0])
    below = error.__cause__ or error.__context__
    return error if below is None else _root(below)
