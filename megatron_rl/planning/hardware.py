"""GPUs and clusters by name: what they have, and how much of it is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.config.schema import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Rates are the maker's, per GPU; `..._share` is the part of them that is reached: see docs/plan.md for where that is from."""

    name: str
    memory_gib: float  # as torch.cuda reports it
    flops: float  # bfloat16, dense, a second
    hbm: float  # bytes a second
    nvlink: float  # bytes a second and direction, to the other GPUs of its node
    network: float  # bytes a second and direction, its own adapter
    dense_share: (
        float  # of `flops`, in a training step's dense matrix products and attention, elementwise work included
    )
    expert_share: float  # of `flops`, in experts' grouped products, permutation included

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_gib * GIB


HBM_SHARE = 0.8  # of Device.hbm, in decoding
EXPERT_HBM_SHARE = 0.5  # of it, for experts' weights in decoding
NVLINK_SHARE = 0.7  # of Device.nvlink, in collectives
NETWORK_SHARE = 0.75  # of Device.network, in collectives
HOST = 20e9  # bytes a second between a GPU and its host's memory

DEVICES = {
    device.name: device
    for device in (
        Device(
            name="A100-40",
            memory_gib=39.5,
            flops=312e12,
            hbm=1555e9,
            nvlink=300e9,
            network=25e9,
            dense_share=0.67,
            expert_share=0.25,
        ),
        Device(
            name="A100-80",
            memory_gib=79.2,
            flops=312e12,
            hbm=2039e9,
            nvlink=300e9,
            network=25e9,
            dense_share=0.67,
            expert_share=0.25,
        ),
        Device(
            name="H100",
            memory_gib=79.1,
            flops=989e12,
            hbm=3350e9,
            nvlink=450e9,
            network=50e9,
            dense_share=0.52,
            expert_share=0.15,
        ),
        Device(
            name="H200",
            memory_gib=139.8,
            flops=989e12,
            hbm=4800e9,
            nvlink=450e9,
            network=50e9,
            dense_share=0.52,
            expert_share=0.15,
        ),
    )
}
OTHER_NAMES = {"A100": "A100-80", "A100-80GB": "A100-80", "A100-40GB": "A100-40", "H100-80": "H100", "H200-141": "H200"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` alike, each with `per_node` GPUs that NVLink joins and one network adapter for each GPU."""

    nodes: int
    per_node: int
    device: Device

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}x{self.device.name}"

    def link(self, ranks: int, stride: int = 1) -> float:
        """Bytes a second of each of `ranks` GPUs, `stride` apart, in a collective of theirs. Within a node that is NVLink's; beyond, the
        adapters' of all its members on a node together, for a ring enters and leaves a node once."""
        inside = self.device.nvlink * NVLINK_SHARE
        if ranks * stride <= self.per_node:
            return inside
        return min(inside, max(1, self.per_node // stride) * self.device.network * NETWORK_SHARE)


def parse_cluster(text: str) -> Cluster:
    """`4x8xA100-80` -> 4 nodes of 8 GPUs. Raises ConfigError for another form and for a GPU that is not in DEVICES."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([A-Za-z][\w-]*)", text.strip())
    if match is None:
        raise ConfigError(
            f"--cluster {text}: it has the form NODESxGPUSxDEVICE, such as 4x8xA100-80; DEVICE is one of {', '.join(DEVICES)}"
        )
    name = match[3].upper()
    name = OTHER_NAMES.get(name, name)
    if name not in DEVICES:
        raise ConfigError(f"--cluster {text}: the device {match[3]!r} is not known; {', '.join(DEVICES)} are")
    return Cluster(nodes=int(match[1]), per_node=int(match[2]), device=DEVICES[name])
