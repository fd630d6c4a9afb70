"""Defines GPUs and clusters by name: their memory, their peak rates, and the share of the rates that is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatron_rl.config.schema import ConfigError
from megatron_rl.devices.hardware import PEAK_FLOPS, board

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU model with its memory and rates. Rates are the vendor's peak rates. Fields ending in `_share` are the share
    of a peak rate that is reached in practice (sources: docs/how_to/plan.md).
    """

    name: str
    board: str  # key of hardware.PEAK_FLOPS
    memory_gib: float  # as torch.cuda reports it
    hbm: float  # memory bandwidth in bytes per second
    nvlink: float  # bytes per second, in one direction, to the other GPUs of the node (by PCIe without NVLink)
    network: float  # bytes per second, in one direction, through the GPU's network adapter
    # share of `flops` that dense matmuls and attention reach in training, including the time of elementwise kernels
    dense_share: float
    expert_share: float  # share of `flops` that the experts' grouped matmuls reach, including token permutation

    @property
    def memory(self) -> float:
        """Returns the memory in bytes."""
        return self.memory_gib * GIB

    @property
    def flops(self) -> float:
        """Returns the peak number of dense bfloat16 operations per second."""
        return PEAK_FLOPS[self.board]


HBM_SHARE = 0.8  # share of the memory bandwidth Device.hbm that decoding reaches
EXPERT_HBM_SHARE = 0.5  # share of Device.hbm that decoding reaches when it reads the experts' weights
NVLINK_SHARE = 0.7  # share of the bandwidth Device.nvlink that collectives reach
NETWORK_SHARE = 0.75  # share of the bandwidth Device.network that collectives reach
HOST = 20e9  # bytes per second between a GPU and host memory

_A100 = Device(
    name="A100-80", board="A100", memory_gib=79.2, hbm=2039e9, nvlink=300e9, network=25e9, dense_share=0.67,
    expert_share=0.25,
)  # fmt: skip
_H100 = Device(
    name="H100", board="H100", memory_gib=79.1, hbm=3350e9, nvlink=450e9, network=50e9, dense_share=0.52,
    expert_share=0.15,
)  # fmt: skip
DEVICES = {
    "A100-40": replace(_A100, name="A100-40", memory_gib=39.5, hbm=1555e9),
    "A100-80": _A100,
    "H100": _H100,
    # its GPUs are connected by PCIe 5; the shares of the peak rates are assumed to be the SXM module's
    "H100-PCIE": replace(_H100, name="H100-PCIE", board="H100-PCIE", hbm=2039e9, nvlink=64e9),
    "H200": replace(_H100, name="H200", board="H200", memory_gib=139.8, hbm=4800e9),
}
OTHER_NAMES = {"A100": "A100-80", "A100-80GB": "A100-80", "A100-40GB": "A100-40", "H100-80": "H100", "H200-141": "H200"}


def device_name(name: str, memory_gib: float) -> str:
    """Returns the name in DEVICES of the device that torch calls `name`, such as "NVIDIA H100 80GB HBM3"; "" if DEVICES
    has no device of this name with about as much memory."""
    near = (d.name for d in DEVICES.values() if d.board == board(name) and abs(d.memory_gib - memory_gib) < 8)
    return next(near, "")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of identical nodes. Each has `per_node` GPUs connected by NVLink or PCIe, and one network adapter per
    GPU."""

    nodes: int
    per_node: int
    device: Device

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}x{self.device.name}"

    def link(self, ranks: int, stride: int = 1) -> float:
        """Returns the bytes per second of each GPU in a collective of `ranks` GPUs whose ranks are `stride` apart.

        Within a node, the result is NVLink's rate. Between nodes, the result is the total rate of the network adapters
        of the collective's GPUs on one node, because a ring enters and leaves each node once.
        """
        inside = self.device.nvlink * NVLINK_SHARE
        if ranks * stride <= self.per_node:
            return inside
        return min(inside, max(1, self.per_node // stride) * self.device.network * NETWORK_SHARE)


def parse_cluster(text: str) -> Cluster:
    """Parses a cluster name: `4x8xA100-80` is 4 nodes of 8 GPUs.

    Raises ConfigError for another format and for a GPU that is not in DEVICES.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([A-Za-z][\w-]*)", text.strip())
    if match is None:
        raise ConfigError(
            f"--cluster {text}: give NODESxGPUSxDEVICE, such as 4x8xA100-80; DEVICE is one of {', '.join(DEVICES)}"
        )
    name = match[3].upper()
    name = OTHER_NAMES.get(name, name)
    if name not in DEVICES:
        raise ConfigError(f"--cluster {text}: the device {match[3]!r} is not known; {', '.join(DEVICES)} are")
    return Cluster(nodes=int(match[1]), per_node=int(match[2]), device=DEVICES[name])
