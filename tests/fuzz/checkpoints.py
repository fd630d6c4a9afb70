"""Damaged and planted checkpoints: each is read or refused by name, and none of them runs anything."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import tempfile
from pathlib import Path

import torch
from damaged_runs import damaged
from fuzzing import Tally, tally

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.dist_writer import DistWriter
from megatron_rl.weights.dist_checkpoint import DistCheckpoint, refuse_code

CALLS = [os.mkdir, os.makedirs, os.system, eval, exec, __import__, getattr, torch.load, pickle.loads, shutil.rmtree]


class _Call:
    """A value whose pickle calls a function with the path of a mark."""

    def __init__(self, call: object, mark: str) -> None:
        self.call, self.mark = call, mark

    def __reduce__(self):
        return self.call, (self.mark,)


def _write(directory: Path, planted: object = None, where: str = "") -> None:
    with DistWriter(directory) as writer:
        writer.add("weight", (4, 4), (0, 0), torch.arange(16.0).reshape(4, 4))
        torch.save([planted if where == "object" else None], directory / "object")
        writer.add_bytes("extra", (directory / "object").read_bytes())
        (directory / "object").unlink()
        writer.finish({"lr": planted if where == "common" else 0.1})
    if where == "metadata":
        (directory / ".metadata").write_bytes(pickle.dumps({"a": planted}))


def fuzz(seed: int, count: int) -> Tally:
    """Plants calls in checkpoints, or damages their files, and reads them in both ways that there are."""
    with tempfile.TemporaryDirectory() as place:

        def one(rng: random.Random) -> str:
            with tempfile.TemporaryDirectory(dir=place) as own:
                directory, mark = Path(own) / "model", Path(own) / "ran"
                directory.mkdir()
                where = rng.choice(["", "", "common", "object", "metadata"])
                _write(directory, _Call(rng.choice(CALLS), str(mark)), where)
                if not where:
                    file = rng.choice(sorted(path for path in directory.iterdir()))
                    file.write_bytes(damaged(file.read_bytes(), rng))
                try:
                    refuse_code(directory)
                    checkpoint = DistCheckpoint(directory)
                    assert [*checkpoint.objects()]
                except ConfigError:
                    assert not mark.exists(), "something was run"
                    return "refused"
                assert not where and not mark.exists(), "it was planted and read"
                return "read"

        return tally(seed, count, one)
