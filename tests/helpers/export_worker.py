"""Runs on two ranks: exports of trained models in shards, with their memory, and one that is killed in the middle."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import Layout, Model, RoleConfig
from megatron_rl.devices.allocator import return_free_pages
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.session import trained
from megatron_rl.weights import hf_model, parameter_mapping
from megatron_rl.weights.hf_writer import HfWriter

M_MMAP_THRESHOLD = -3  # number of an option of glibc's mallopt


def status(name: str) -> int:
    """Returns a size of this process in bytes, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def exported(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Exports one model. Returns the peak memory of the export, and whether the files hold the policy's weights."""
    model, target = Model(path=case["model"], dtype=case["dtype"]), Path(case["target"])
    role = RoleConfig(model=model, layout=Layout(**case["layout"]))
    policy = MegatronPolicy(role, parallel.create(role.layout), trainable=False)
    return_free_pages()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident = status("VmRSS")
    trained.export_model(world, policy.export, model, target, shard_bytes=case["shard_bytes"])
    peak = status("VmHWM") - resident
    files, expected = hf_model.DirectoryTensors(target), set(parameter_mapping.hf_shapes(policy.arch))
    same = all(torch.equal(tensor, files.whole(name)) for name, tensor in policy.export.weights())
    return {"peak": peak, "same": same, "names": files.stored.keys() == expected}


def kill_at(call: int) -> None:
    """Makes writing tensors kill this process at its `call`-th call."""
    write, calls = HfWriter.write, []

    def counted(self: HfWriter, name: str, tensor: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, name, tensor)

    HfWriter.write = counted  # type: ignore[method-assign]


def main(output_path: str, cases: str, killed_at: str) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # malloc keeps no freed tensors, which would count as used
    dist.init_process_group("gloo")
    world = World()
    if int(killed_at) and world.rank == 0:
        kill_at(int(killed_at))
    answers = {name: exported(world, case) for name, case in json.loads(cases).items()}
    Path(output_path).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
