"""The write-ahead log: what was finished is read back exactly, a record that was cut off or damaged is never read, and
what has no record is asked for again.
"""

from __future__ import annotations

import os
import resource
import threading
from dataclasses import fields

import numpy as np
import pytest

from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.run.json_lines import DiskError
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore, Waiting
from megatron_rl.training.write_ahead import COMMIT_S, LogFile, WriteAhead
from megatron_rl.types import Outcome, Stop

ITERATION = Iteration(cycle=0, index=0, roles=("a",), number=7)
WHOLE = Completion(
    tokens=[5, 6, 7], logprobs=[-0.1, np.float32(1e-38), 0.0], model_logprobs=[-1.0, -2.0, -0.0], stop=Stop.EOS,
    versions=[(0, 3), (2, 4)], experts=np.arange(12, dtype=np.int16).reshape(3, 2, 2), authors=[True, False, True],
)  # fmt: skip
PLAIN = Completion(tokens=[], logprobs=[], stop=Stop.LENGTH)
GRADED = Graded(Outcome.SCORE, 0.1 + 0.2, "fine", 0.5, metrics={"format": 1 / 3})


def completion(number: int) -> Completion:
    return Completion(tokens=[number] * 5, logprobs=[-number / 7] * 5, stop=Stop.STOP)


def same(one: Completion, other: Completion) -> bool:
    for field in fields(Completion):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
        else:
            assert ours == theirs and type(ours) is type(theirs)
    return True


def write(path, *transactions: int) -> list[int]:
    """Writes transactions of so many records each. Returns the size of the file after each of them."""
    file, sizes, number = LogFile(path, "same"), [path.stat().st_size], 0
    for count in transactions:
        file.add([(address(number + i), completion(number + i)) for i in range(count)])
        number += count
        sizes.append(path.stat().st_size)
    file.close()
    return sizes


def address(number: int) -> bytes:
    return number.to_bytes(16, "big")


def readable(path, count: int) -> list[int]:
    """Returns which of so many records are there. Fails for a wrong value."""
    file = LogFile(path, "same")
    found = [i for i in range(count) if (one := file.read(address(i))) is not None and same(one, completion(i))]
    assert file.recovered == len(found)
    file.close()
    return found


def test_durable_values_come_back_to_the_last_bit(tmp_path):
    file = LogFile(tmp_path / "log", "same")
    file.add([(address(1), WHOLE), (address(2), PLAIN), (address(3), GRADED)])
    file.close()
    again = LogFile(tmp_path / "log", "same")
    assert same(again.read(address(1)), WHOLE) and same(again.read(address(2)), PLAIN)
    assert again.read(address(3)) == GRADED and again.read(address(4)) is None
    again.close()


def test_durable_a_torn_end_is_cut_off_wherever_the_process_was_killed(tmp_path, caplog):
    """The file is cut at every byte: exactly the transactions before it are there, and what is added then is read."""
    path, counts = tmp_path / "log", (1, 3, 1)
    sizes = write(path, *counts)
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        caplog.clear()
        whole = sum(end <= size for end in sizes) - 1  # transactions
        left = list(range(sum(counts[: max(0, whole)])))
        assert readable(path, 5) == left
        torn = size not in (0, *sizes)
        assert ("was not written completely" in caplog.text) is torn, size
        file = LogFile(path, "same")
        file.add([(address(9), completion(9))])
        file.close()
        again = LogFile(path, "same")
        assert same(again.read(address(9)), completion(9)) and again.recovered == len(left) + 1
        again.close()


def test_durable_a_damaged_byte_loses_its_own_transaction_and_never_gives_a_wrong_value(tmp_path, caplog):
    path = tmp_path / "log"
    sizes = write(path, 1, 2, 1)
    data = path.read_bytes()
    transactions = [[0], [1, 2], [3]]
    for place in range(sizes[0], len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        caplog.clear()
        hit = sum(end <= place for end in sizes) - 1
        others = [n for i, own in enumerate(transactions) if i != hit for n in own]
        before = [n for own in transactions[:hit] for n in own]
        # a damaged length leaves no way to find the records behind it
        assert readable(path, 4) in (others, before), place
        assert str(path) in caplog.text, "it is said"
    broken = bytearray(data)
    broken[sizes[1] - 1] ^= 1  # the value of the first record
    path.write_bytes(broken)
    assert readable(path, 4) == [1, 2, 3]


def test_durable_a_file_of_other_settings_is_not_read(tmp_path):
    write(tmp_path / "log", 2)
    assert LogFile(tmp_path / "log", "other").recovered == 0
    assert readable(tmp_path / "log", 2) == []


def test_durable_a_full_disk_is_told_and_leaves_whole_records(tmp_path):
    path = tmp_path / "log"
    file = LogFile(path, "same")
    file.add([(address(0), completion(0))])
    before, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 100, limits[1]))
    try:
        with pytest.raises(DiskError, match=r"log cannot be written \(.*free some space"):
            file.add([(address(1), completion(1)), (address(2), completion(2))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == before
    file.add([(address(3), completion(3))])
    file.close()
    file.add([(address(4), completion(4))])  # from a request that was cancelled: nothing is written any more
    assert readable(path, 5) == [0, 3]


def test_durable_a_log_whose_directory_cannot_be_made_is_told(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(DiskError, match=r"taken/log cannot be written \(File exists\): .*free some space"):
        LogFile(tmp_path / "taken/log", "same")


def test_durable_a_flush_that_failed_is_told_by_the_next_write(tmp_path, monkeypatch):
    def fails(file):
        raise OSError(28, "No space left on device")

    file = LogFile(tmp_path / "log", "same")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        file._flush()
    with pytest.raises(DiskError, match=r"log cannot be written \(No space left on device\): .*free some space"):
        file.add([(address(0), completion(0))])
    file.close()


def test_durable_writes_of_a_moment_are_flushed_together(tmp_path, monkeypatch):
    flushed, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(descriptor) or sync(descriptor))
    file = LogFile(tmp_path / "log", "same")
    for i in range(200):
        file.add([(address(i), completion(i))])
    assert file._commit is not None
    file._commit.join(60 * COMMIT_S)
    assert 1 <= flushed.count(file._file.fileno()) <= 20
    file.close()


def test_durable_a_file_is_not_closed_while_it_is_flushed(tmp_path, monkeypatch):
    """The number of a closed file may already be that of another one."""
    inside, go, sync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        inside.set()
        assert go.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    file = LogFile(tmp_path / "log", "same")
    assert inside.wait(60)
    file.add([(address(0), completion(0))])  # nobody waits for the disk
    closing = threading.Thread(target=file.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go.set()
    closing.join(60)
    assert not closing.is_alive() and file._failure is None
    assert readable(tmp_path / "log", 1) == [0]


def grading(calls):
    def grade(responses, payloads):
        calls.append(list(responses))
        return [
            Graded(Outcome.TIMEOUT if text == "late" else Outcome.SCORE, float(len(calls) + i / 10), seconds=1.0)
            for i, text in enumerate(responses)
        ]

    return grade


def grader(directory, calls):
    """The grader of a process that begins the iteration."""
    return WriteAhead(directory, "same").open(ITERATION.number).grader(grading(calls))


def test_durable_gradings_are_made_once_and_a_failed_one_is_tried_again(tmp_path):
    problem, other, calls = {"answer": "1", "question": "q"}, {"answer": "2", "question": "q"}, []
    asked = (["one", "late", "one", "one"], [problem, problem, problem, other])
    first = grader(tmp_path, calls)(*asked)
    assert calls == [["one", "late", "one", "one"]]
    resumed = grader(tmp_path, calls)
    # in another order, with the fields of the problem in another order, and with a text that is new
    turned = dict(reversed(problem.items()))
    again = resumed(["one", "late", "new", "one", "one"], [other, problem, problem, turned, problem])
    assert calls[1:] == [["late", "new"]]
    assert [again[i] for i in (0, 3, 4)] == [first[i] for i in (3, 0, 2)]
    assert resumed(["one"], [problem])[0].score == 3.0, "a third time was never asked for before"
    assert grader(tmp_path, calls)(*asked)[0] == first[0] and calls[-1] == ["late"]


def test_durable_the_file_goes_when_the_iteration_is_stored_and_with_what_cannot_be_used(tmp_path):
    store = IterationStore(tmp_path, "same")
    for number in (5, 6, 7, 8):
        store.ahead.open(number).grader(grading([]))(["a"], [{}])
    (tmp_path / "iteration_x.ahead").touch()  # none of ours
    store.put(ITERATION, Collected(rollouts={}, metrics={}), {})
    assert sorted(path.name for path in tmp_path.glob("*_0*")) == [
        "iteration_000005.ahead", "iteration_000006.ahead", "iteration_000007.parquet", "iteration_000008.ahead",
    ]  # fmt: skip
    assert IterationStore(tmp_path, "same").clean(6) == Waiting(kept=1, dropped=0, begun=2)
    assert not store.ahead.path(5).exists() and store.ahead.path(6).exists()
    assert IterationStore(tmp_path, "same").clean(6, fresh=True) == Waiting(kept=0, dropped=1, begun=0)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_x.ahead"]


def test_durable_requests_of_equal_content_are_numbered(tmp_path):
    file = LogFile(tmp_path / "log", "same")
    asked = Sampling(max_tokens=3, n=2)
    contents = [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"bc"), (b"abc",), (repr(asked).encode(),)]
    found = [file.address(*content) for content in contents]
    assert len({*found}) == len(found)
    again = LogFile(tmp_path / "log", "same")
    assert [again.address(*content) for content in reversed(contents)] == [found[i] for i in (4, 3, 0, 1, 2)]
