"""How core's writers of checkpoints are started, and whom they report to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.managers import SyncManager

from megatron_rl.run.parent_death import end_with_parent

HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # while a checkpoint is written
_manager: SyncManager | None = None  # the process that has the queues of this rank's saves


@contextlib.contextmanager
def one_save() -> Iterator[None]:
    """Begins one save in the block, whose writers report to a queue of their own.

    Core has one queue for all saves of a process, and takes the oldest report in it for that of the save which it asks
    about. Of two roles' saves under way at once each then got the other's places in the files whenever the second was
    written first: a checkpoint with right checksums that could not be read.

    The writer processes, forked in the block, inherit that signals are held back: one to the whole group must not kill
    them in the middle of a file.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async as core

    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        if "_results_queue" in vars(core):  # not in every core
            core._results_queue = (_manager or start_manager()).Queue()  # type: ignore[assignment]
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_manager() -> SyncManager:
    """Starts the process that has the queues of this rank's saves. It ends with this rank: core's own stays for ever
    when the rank is killed. It listens at a name that no file system knows (Linux), behind its key: core's leaves a
    directory for temporary files when it is killed itself. The caller holds signals back, which it inherits."""
    name = f"\0megatron_rl-{uuid.uuid4().hex}" if sys.platform == "linux" else None
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)  # the tracker's start lets some of them through again
    manager = SyncManager(name, ctx=multiprocessing.get_context("spawn"))
    manager.start(end_with_parent, (signal.SIGKILL, os.getpid()))
    share_manager(manager)
    return manager


def share_manager(manager: SyncManager) -> None:
    """Has this rank's saves report to queues of a process that runs already."""
    global _manager
    _manager = manager
