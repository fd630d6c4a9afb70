"""Checkpoints that run code, or in which bits have flipped, are refused before anything of them is used."""

from __future__ import annotations

import os
import pickle
import subprocess

import pytest
import torch

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.dist_writer import DistWriter
from megatron_rl.run.checkpoint import MANIFEST, Checkpoints, known_digests, read_json, sum_up
from megatron_rl.run.file_checksums import SUMS, write_sums, wrong, wrong_of
from megatron_rl.weights.dist_checkpoint import DistCheckpoint, refuse_code


class Planted:
    """A value whose pickle runs a command when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def write(directory, *, common=None, obj=None):
    """Writes a checkpoint with one tensor and one object."""
    directory.mkdir(parents=True)
    with DistWriter(directory) as writer:
        writer.add("weight", (4, 4), (0, 0), torch.arange(16.0).reshape(4, 4))
        file = directory / "object"
        torch.save([None] if obj is None else obj, file)
        writer.add_bytes("extra", file.read_bytes())
        file.unlink()
        writer.finish({"lr": 0.1} if common is None else common)
    return directory


def test_hostile_checks_let_a_checkpoint_of_data_pass(tmp_path):
    place = write(tmp_path / "model")
    refuse_code(place)
    checkpoint = DistCheckpoint(place)
    assert torch.equal(checkpoint.parameter("weight"), torch.arange(16.0).reshape(4, 4)) and [*checkpoint.objects()]


@pytest.mark.parametrize("where", ["common", "obj", "metadata"])
def test_hostile_pickle_in_a_checkpoint_is_not_run(tmp_path, where):
    """`convert`, `reshard` and a run that went on ran whatever a planted file said."""
    mark = tmp_path / "ran"
    planted = {where: Planted(mark)} if where != "metadata" else {}
    place = write(tmp_path / "model", **planted)
    if where == "metadata":
        (place / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    with pytest.raises(ConfigError, match=r"mkdir.* --trust"):
        refuse_code(place)
    with pytest.raises(ConfigError):
        [*DistCheckpoint(place).objects()]
        refuse_code(place)
    assert not mark.exists()


def test_hostile_pickle_is_read_where_its_writer_is_trusted(tmp_path):
    place = write(tmp_path / "model", obj=Planted(tmp_path / "ran"))
    assert [*DistCheckpoint(place, trust=True).objects()] and (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "torch.load", "torch.serialization.load", "posix.system"]
)
def test_hostile_names_in_a_metadata_file(tmp_path, name):
    place = write(tmp_path / "model")
    module, _, function = name.rpartition(".")
    (place / ".metadata").write_bytes(f"c{module}\n{function}\n(S'true'\ntR.".encode())
    for read in (refuse_code, DistCheckpoint):
        with pytest.raises(ConfigError, match="no data of a checkpoint"):
            read(place)


def save(directory, ranks: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep=2)
    for number in (1, 2):
        pending = checkpoints.begin(number)
        (pending / "model").mkdir()
        for rank in range(ranks):
            (pending / f"model/__{rank}_0.distcp").write_bytes(os.urandom(1000))
            sum_up(pending, {"model": rank})
        (pending / "state.json").write_text("{}")
        checkpoints.commit(number)
    return checkpoints


def test_checksums_are_of_the_files_that_a_rank_wrote_for_each_role(tmp_path):
    """Of two roles on ranks 0-1 and 1-2, both have files named by the places 0 and 1. Rank 1 wrote file 1 of the first
    and file 0 of the second."""
    pending = Checkpoints(tmp_path).begin(1)
    for role in ("actor", "critic"):
        (pending / role).mkdir()
        for place in (0, 1, 10):
            (pending / role / f"__{place}_0.distcp").write_bytes(f"{role} {place}".encode())
    sum_up(pending, {"actor": 1, "critic": 0})
    summed = {str(file.relative_to(pending)): read_json(file) for file in pending.rglob(".sums.*")}
    assert {name: [*sums] for name, sums in summed.items()} == {
        "actor/.sums.1.json": ["actor/__1_0.distcp"],
        "critic/.sums.0.json": ["critic/__0_0.distcp"],
    }
    path = Checkpoints(tmp_path).commit(1).path
    assert len(known_digests(path)) == 6 and verify(path) == [], "the others are summed up at the end"


def verify(path):
    return wrong(path, known_digests(path))


@pytest.mark.parametrize("name", ["model/__1_0.distcp", "state.json"])
def test_hostile_bit_in_a_checkpoint_is_seen(tmp_path, name):
    """A flipped bit was loaded and trained on: a file's size is the same."""
    checkpoints = save(tmp_path)
    newest = checkpoints.newest(verify)
    assert newest is not None and newest.number == 2
    assert {*known_digests(newest.path)} == {*read_json(newest.path / MANIFEST)["files"]}
    assert not [*newest.path.rglob(".sums*")]
    file = newest.path / name
    file.write_bytes(bytes([file.read_bytes()[0] ^ 4]) + file.read_bytes()[1:])
    found = checkpoints.newest(verify)
    assert found is not None and found.number == 1, "the one before is whole"
    parts = [wrong(newest.path, known_digests(newest.path), part=(i, 3)) for i in range(3)]
    assert sum(map(len, parts)) == 1 and "is not what was written" in max(parts, key=len)[0]


def test_hostile_bit_in_weights_is_seen(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(os.urandom(5000))
    assert wrong_of(tmp_path) == [], "nobody wrote checksums"
    write_sums(tmp_path)
    assert wrong_of(tmp_path) == []
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=tmp_path, check=False).returncode == 0
    data = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[:70] + bytes([data[70] ^ 1]) + data[71:])
    assert len(wrong_of(tmp_path)) == 1 and "b.safetensors" in wrong_of(tmp_path)[0]
    (tmp_path / "a.safetensors").unlink()
    assert len(wrong_of(tmp_path)) == 2
    (tmp_path / SUMS).write_text("nonsense\n" + "0" * 64 + "  ../../etc/passwd\n")
    assert all("is damaged" in fault for fault in wrong_of(tmp_path))
