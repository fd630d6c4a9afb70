"""Slots of a refit's messages in files: what goes wrong is an error of the transport that names the place."""

import re
import shutil

import pytest
import torch

from megatron_rl.refit.shared_memory_transport import Disk
from megatron_rl.refit.transport import TransportError

CPU = torch.device("cpu")


def test_a_message_is_read_from_the_file_that_was_published(tmp_path):
    disk = Disk(tmp_path / "new" / "slots")
    address, message = disk.allocate(5, CPU)
    message[:] = torch.arange(5, dtype=torch.uint8)
    assert disk.publish(address, message) == address and disk.open(address, CPU).tolist() == [0, 1, 2, 3, 4]
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
        Disk(tmp_path).open("x.safetensors", CPU)
    for address in ("../x", 3, None):
        with pytest.raises(RuntimeError, match="is not a file name"):
            Disk(tmp_path).open(address, CPU)
