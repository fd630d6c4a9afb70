"""Starts the processes that write Megatron-core's checkpoints in the background, and provides their result queues."""

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

HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # signals that are blocked while a checkpoint is written
# manager process of the queues to which this rank's writer processes report results
_manager: SyncManager | None = None
# process id of the rank that saves a checkpoint now; its forked children must not outlive it. None outside of a save.
_saver: int | None = None


@contextlib.contextmanager
def one_save() -> Iterator[None]:
    """Context manager in which the caller starts one checkpoint save. The writer processes of the save report to a
    separate queue.

    Megatron-core has one queue for all saves of a process and assigns the oldest result in the queue to any save that
    it polls. If two roles save at once and the second save finishes first, each save would get the file offsets of the
    other save. The checkpoints would then have correct checksums and be unreadable.

    Signals are blocked inside the context. The writer processes are forked inside the context and inherit the blocked
    signals, because a signal to the whole process group must not kill a writer in the middle of a file. A writer is
    killed, however, when its rank ends. Otherwise the writer could wait forever and would keep the rank's connections
    open, so that neither the other ranks nor their launcher would notice the rank's end.
    """
    global _saver
    from megatron.core.dist_checkpointing.strategies import filesystem_async as core

    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    _saver = os.getpid()
    try:
        if "_results_queue" in vars(core):  # not every version of Megatron-core has this queue
            core._results_queue = (_manager or start_manager()).Queue()  # type: ignore[assignment]
        yield
    finally:
        _saver = None
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def start_manager() -> SyncManager:
    """Starts the manager process of the queues to which this rank's writer processes report results.

    The process ends with this rank, whereas Megatron-core's manager process runs forever if the rank is killed. On
    Linux the process listens on an abstract socket protected by an authentication key; Megatron-core's manager leaves a
    temporary directory behind if it is killed. The caller must block signals beforehand; the manager process inherits
    the blocked signals.
    """
    name = f"\0megatron_rl-{uuid.uuid4().hex}" if sys.platform == "linux" else None
    resource_tracker.ensure_running()
    # Block the signals again, because the function that starts the resource tracker unblocks some of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    manager = SyncManager(name, ctx=multiprocessing.get_context("spawn"))
    manager.start(end_with_parent, (signal.SIGKILL, os.getpid()))
    share_manager(manager)
    return manager


def share_manager(manager: SyncManager) -> None:
    """Makes this rank's checkpoint writer processes report to queues of `manager`, which is already running."""
    global _manager
    _manager = manager


def _end_with_saver() -> None:
    """Fork hook, called in every forked process. If the process was forked during a checkpoint save, sets it up to be
    killed when its parent ends. Processes that this process forks later are set up in the same way."""
    global _saver
    if _saver is not None:
        end_with_parent(signal.SIGKILL, _saver)
        _saver = os.getpid()


os.register_at_fork(after_in_child=_end_with_saver)
