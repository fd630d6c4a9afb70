"""Slots of a refit's messages in files: what goes wrong is an error of the transport that names the place."""

import re
import shutil

import pytest
import torch

from megatron_rl.config.schema import ConfigError, RefitConfig
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.shared_memory_transport import CudaIpc, Disk, SharedMemory, Slots
from megatron_rl.refit.transport import Deadline, TransportError

CPU = torch.device("cpu")
SOON = Deadline.start(60.0, 60.0)


def test_a_message_is_read_from_the_file_that_was_published(tmp_path):
    disk = Disk(tmp_path / "new" / "slots")
    address, message = disk.allocate(5, CPU)
    message[:] = torch.arange(5, dtype=torch.uint8)
    assert disk.publish(address, message) == address and disk.open(address, CPU, SOON).tolist() == [0, 1, 2, 3, 4]
    disk.free(address)
    assert not list((tmp_path / "new" / "slots").iterdir())


def test_a_directory_that_is_gone_is_an_error_of_the_transport(tmp_path):
    disk = Disk(tmp_path / "slots")
    address, message = disk.allocate(5, CPU)
    shutil.rmtree(tmp_path / "slots")
    with pytest.raises(TransportError, match=re.escape(str(tmp_path / "slots"))):
        disk.publish(address, message)


def test_a_file_that_is_no_message_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "x.safetensors"))):
        Disk(tmp_path).open("x.safetensors", CPU, SOON)
    for address in ("../x", 3, None):
        with pytest.raises(RuntimeError, match="is not a file name"):
            Disk(tmp_path).open(address, CPU, SOON)


def test_faults_only_slots_of_this_user_are_opened():
    """An engine that names another file would have the trainer's weights written into it."""
    sender, receiver = SharedMemory(), SharedMemory()
    address, memory = sender.allocate(8, CPU)
    prefix = address[0][:-16]
    for name in (7, f"{prefix}/../{address[0]}", f"../{address[0]}", "somebody-0-0", f"x{address[0]}"):
        with pytest.raises(RuntimeError, match="is not a slot of this user"):
            receiver.open([name, 8], CPU, SOON)
    memory.fill_(3)
    assert receiver.open(address, CPU, SOON).tolist() == [3] * 8
    sender.free(address)


def test_an_announcement_that_is_none_is_an_error_of_the_transport():
    """The exchange took a ValueError for a lost message before it left it to the transports."""
    store = RefitStore.host("127.0.0.1")[0]
    store.put("1-0/0", ["a slot without its size"])
    slots = Slots(store, 0, SharedMemory())
    with pytest.raises(TransportError, match="bucket 0 from 1: .* is no valid message"):
        slots.receive(1, "bucket 0", 8, CPU).wait(Deadline.start(60.0, 60.0))
    slots.close()


def test_a_slot_is_at_most_an_eighth_larger_than_its_message():
    """A message of 512 MiB with its checksums took 1 GiB."""
    slots = Slots(RefitStore.host("127.0.0.1")[0], 0, SharedMemory())
    for size, room in ((1, 1 << 16), (1 << 20, 1 << 20), ((1 << 20) + 8, (1 << 20) + (1 << 17)), (1 << 21, 1 << 21)):
        assert len(slots.buffer(size, CPU)) == size
        assert [len(slot.memory) for slot in slots._slots] == [room]
    slots.close()


def test_a_slot_that_the_memory_cannot_hold_is_refused_before_anything_is_written_to_it():
    """A write to it would end the process by a bus error."""
    medium = SharedMemory()
    with pytest.raises(TransportError, match="no 1073741824 MiB of shared memory are free in .*: lower refit.bucket"):
        medium.allocate(1 << 50, CPU)
    assert not medium._held


def test_no_slot_of_cuda_ipc_is_in_an_expandable_segment(monkeypatch):
    """The receiver cannot open such a segment unless it may trace the sender, which containers forbid."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: (0, b"handle", storage.nbytes(), 0))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    address, message = CudaIpc().allocate(64, CPU)
    assert len(message) == 64 and address == [0, b"handle".hex(), 64, 0]
    assert told == [
        "max_split_size_mb:128,expandable_segments:False",
        "max_split_size_mb:128,expandable_segments:True",
    ]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    CudaIpc().allocate(64, CPU)
    assert len(told) == 2


def test_a_slot_of_cuda_ipc_is_opened_on_the_gpu_as_its_receiver_numbers_it(monkeypatch):
    opened: list[list[object]] = []
    storage = torch.arange(64, dtype=torch.uint8).untyped_storage()
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *parts: opened.append([*parts]) or storage)
    message = CudaIpc().open([0, b"handle".hex(), 64, 0], torch.device("cuda", 3), SOON)
    assert opened == [[3, b"handle", 64, 0]] and message.tolist() == [*range(64)]


def test_files_without_a_directory_are_refused_by_the_config():
    """`check` accepted it, and the run ended at its first refit."""
    with pytest.raises(ConfigError, match="refit.transport = disk: set refit.directory"):
        RefitConfig(transport="disk")
