"""Writes the finished samples and gradings of an iteration to disk before the iteration is complete (a write-ahead
log), so that a run that is killed and resumed does not sample or grade them again.

Records are found by their content. The content of a sample is its role, prompt, sampling settings with seed, request
key and sample index; the content of a grading is the response and the fields of the problem. Requests with equal
content are numbered in the order in which they are made. In a resumed run, such requests may exchange their samples,
which have the same distribution. The order of other requests does not matter. An episode is resumed by playing it again
from the start, with the samples in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_rl.engines.protocol import Completion, SampleLog, Sampling
from megatron_rl.lib.regular_files import UntrustedFile, regular
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.run.atomic_files import push
from megatron_rl.run.json_lines import RESUME, DiskError
from megatron_rl.training.iteration import Grade
from megatron_rl.types import Outcome, Stop

FORMAT = 1  # version of the file format
# Number of seconds after a write at which the file is flushed to the disk (fsync). The flush covers all writes until
# then, and the next write starts to count again.
COMMIT_S = 0.1
# A record consists of a prefix, a digest of prefix and body, and the body. The body has the record's address and the
# packed value. The prefix has three numbers: the number of bytes of the body, 1 if the record ends a transaction (else
# 0), and the CRC-32 of these two numbers.
_PREFIX, _COUNTED = struct.Struct("<QBI"), struct.Struct("<QB")
_DIGEST_BYTES = 16
_NAME = re.compile(r"iteration_([0-9]{1,18})\.ahead")
_KINDS = [Completion, Stop, Graded, Outcome]
_log = logging.getLogger(__name__)


class WriteAhead:
    """The write-ahead files (iteration_000012.ahead, ...) of the iterations in flight, in the directory of a run's
    iteration store. `fingerprint`: hash of the run's settings; files written under other settings are not used.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory, self._fingerprint = Path(directory), fingerprint
        self._open: dict[int, LogFile] = {}  # files of the iterations in flight, by number of the iteration

    def path(self, number: int) -> Path:
        return self.directory / f"iteration_{number:06d}.ahead"

    def open(self, number: int) -> LogFile:
        """Opens the file of iteration `number`, with the records that an earlier process of the run wrote."""
        if number in self._open:
            self._open[number].close()
        file = self._open[number] = LogFile(self.path(number), self._fingerprint)
        return file

    def drop(self, number: int) -> None:
        """Removes the file of an iteration, whose rollouts are completely written to the iteration store."""
        if (file := self._open.pop(number, None)) is not None:
            file.close()
        self.path(number).unlink(missing_ok=True)

    def clean(self, keep: Callable[[int], bool]) -> int:
        """Removes the files of iterations that are not needed. `keep`: function (number of an iteration) -> whether its
        file is kept. Returns the number of files kept.
        """
        names = [found for path in self.directory.glob("*") if (found := _NAME.fullmatch(path.name))]
        kept = {int(found[1]): keep(int(found[1])) for found in names}
        for number in (number for number, stays in kept.items() if not stays):
            self.drop(number)
        return sum(kept.values())


class LogFile:
    """An append-only file of records, each with an address and a value. Thread-safe.

    When `add` returns, a record is in the page cache, so it survives the death of the process. After COMMIT_S seconds,
    it is on the disk. When a file is opened, its records are read. If a record is cut off, reading ends there, and the
    record and everything after it are removed. If a record in the middle is damaged, it is skipped, together with the
    other records of its transaction. In both cases a warning is logged.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Opens the file, or creates it. A file with another fingerprint or format is emptied. Raises DiskError if the
        file cannot be opened.
        """
        self.path, self.recovered = path, 0  # recovered: number of records that the file had when it was opened
        self._places: dict[bytes, tuple[int, int]] = {}  # {address: (offset, size) of the packed value}
        self._times: Counter[bytes] = Counter()  # number of calls of `address` for each content
        self._change = threading.Lock()  # guards the file and the attributes
        self._sync = threading.Lock()  # lock that is held while the file is flushed or closed
        self._closed, self._new = False, True  # _new: True until the directory entry is flushed too
        self._commit: threading.Timer | None = None  # the pending flush to the disk
        self._failure: OSError | None = None  # error of a flush
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(path, "a+b", buffering=0, opener=regular)  # noqa: SIM115 (closed by `close`)
            head, self._end = _digest(f"{FORMAT} {fingerprint}".encode()), 0
            self._recover()
            if self._places.pop(head, None) is None:
                self._places, self._end = {}, 0
                self._file.truncate(0)
            self.recovered = len(self._places)
        except UntrustedFile:
            raise
        except OSError as error:
            raise self._error(error) from error
        if not self._end:
            self.add([(head, None)])

    def samples(self, role: str) -> SampleLog:
        """Returns the log of a role's samples, for sessions with the role's engine."""
        return RoleLog(self, role)

    def grader(self, grade: Grade) -> Grade:
        """Returns a function that grades responses. Gradings in the file are used again. Other responses are graded
        with `grade`, and the new gradings are added to the file, except gradings that failed or were cut off, because a
        resumed run may succeed in grading these responses.
        """

        def logged(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
            problems = [repr(sorted(payload.items())).encode() for payload in payloads]
            texts = [response.encode("utf-8", "surrogatepass") for response in responses]
            asked = [self.address(b"grade", *pair) for pair in zip(texts, problems, strict=True)]
            graded = [self.read(address) for address in asked]
            rest = [i for i, one in enumerate(graded) if one is None]
            fresh = grade([responses[i] for i in rest], [payloads[i] for i in rest]) if rest else []
            done = [(asked[i], one) for i, one in zip(rest, fresh, strict=True)]
            self.add([pair for pair in done if pair[1].outcome is Outcome.SCORE and not pair[1].cut_off])
            for i, one in zip(rest, fresh, strict=True):
                graded[i] = one
            return graded

        return logged

    def address(self, *content: bytes) -> bytes:
        """Returns the address of a request with this content. Requests with equal content are numbered in the order of
        the calls.
        """
        digest = _digest(*(piece for part in content for piece in (len(part).to_bytes(8, "little"), part)))
        with self._change:
            self._times[digest] += 1
            return _digest(digest, self._times[digest].to_bytes(8, "little"))

    def read(self, address: bytes) -> Any:
        """Returns the value with an address, among the records that the file had when it was opened; None if there is
        no such record.
        """
        from megatron_rl.messages.message_codec import (
            unpack,  # slow to import, and not needed to read the iteration store
        )

        if self._closed or address not in self._places:
            return None
        offset, size = self._places[address]
        return unpack(os.pread(self._file.fileno(), size, offset), _KINDS)

    def add(self, records: Sequence[tuple[bytes, Any]]) -> None:
        """Appends records (address, value) as one transaction: a reader gets all records, or no record if the process
        was killed during the write. No-op for a closed file. Raises DiskError if the records cannot be written.
        """
        from megatron_rl.messages.message_codec import pack

        with self._change:
            if self._closed or not records:
                return
            if self._failure is not None:
                raise self._error(self._failure)
            try:
                for number, (address, value) in enumerate(records, start=1):
                    packed = pack(value, _KINDS)
                    counted = _COUNTED.pack(_DIGEST_BYTES + len(packed), number == len(records))
                    prefix = counted + zlib.crc32(counted).to_bytes(4, "little")
                    left = memoryview(b"".join([prefix, _digest(prefix, address, packed), address, packed]))
                    while left:
                        left = left[self._file.write(left) :]
            except OSError as error:
                with contextlib.suppress(OSError):  # ignore errors: an incomplete transaction is not read
                    self._file.truncate(self._end)
                raise self._error(error) from error
            self._end = self._file.seek(0, os.SEEK_END)
            if self._commit is None:
                self._commit = threading.Timer(COMMIT_S, self._flush)
                self._commit.daemon = True
                self._commit.start()

    def close(self) -> None:
        """Closes the file. Records that are added later are discarded."""
        with self._change:
            self._closed, commit = True, self._commit
        if commit is not None:
            commit.cancel()
        with self._sync:
            self._file.close()

    def _flush(self) -> None:
        with self._sync:
            with self._change:
                self._commit = None
                if self._closed:
                    return
            try:
                os.fsync(self._file.fileno())
                if self._new:
                    push([self.path.parent])
                    self._new = False
            except OSError as error:
                self._failure = error

    def _recover(self) -> None:
        """Reads the addresses of all records and cuts off what follows the last complete transaction."""
        size, place = self._file.seek(0, os.SEEK_END), 0
        pending: dict[bytes, tuple[int, int]] | None = {}  # current transaction; None if one of its records is damaged
        while (record := self._record(place, size)) is not None:
            address, begin, place, last = record
            if address is None:
                _log.warning("%s: the record up to byte %d is damaged and is left out", self.path, place)
                pending = None
            elif pending is not None:
                pending[address] = begin, place - begin
            if last:
                self._places |= pending or {}
                pending, self._end = {}, place
        if self._end < size:
            _log.warning(
                "%s ends in a record that was not written completely: %d bytes are cut off", self.path, size - self._end
            )
            self._file.truncate(self._end)

    def _record(self, place: int, size: int) -> tuple[bytes | None, int, int, bool] | None:
        """Reads the record at byte `place` of a file of `size` bytes. Returns the record's address (None if the record
        is damaged), the offset of its value, the end of the record, and whether the record ends a transaction. Returns
        None if the record is cut off.
        """
        file, start = self._file.fileno(), place + _PREFIX.size + _DIGEST_BYTES
        head = os.pread(file, start - place, place)
        if len(head) < start - place:
            return None
        prefix, digest = head[: _PREFIX.size], head[_PREFIX.size :]
        length, last, checked = _PREFIX.unpack(prefix)
        if checked != zlib.crc32(prefix[: _COUNTED.size]) or length > size - start:
            return None
        body = os.pread(file, length, start)
        good = digest == _digest(prefix, body)
        if not good and start + length == size:
            return None
        return body[:_DIGEST_BYTES] if good else None, start + _DIGEST_BYTES, start + length, bool(last)

    def _error(self, error: OSError) -> DiskError:
        return DiskError(f"{self.path} cannot be written ({error.strerror or error}): {RESUME}")


class RoleLog:
    """The samples of one role in a file. Implements engines.protocol.SampleLog."""

    def __init__(self, file: LogFile, role: str) -> None:
        self._file, self._role = file, role

    def known(self, key: int, tokens: np.ndarray, sampling: Sampling) -> tuple[bytes, dict[int, Completion]]:
        address = self._file.address(f"{self._role} {key} {sampling}".encode(), tokens.tobytes())
        found = {j: self._file.read(_of_sample(address, j)) for j in range(sampling.n)}
        return address, {j: completion for j, completion in found.items() if completion is not None}

    def add(self, samples: Sequence[tuple[bytes, int, Completion]]) -> None:
        self._file.add([(_of_sample(address, j), completion) for address, j, completion in samples])


def _of_sample(address: bytes, sample: int) -> bytes:
    return _digest(address, sample.to_bytes(8, "little"))


def _digest(*parts: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
