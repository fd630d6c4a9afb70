"""Refits of a trainer, one engine that follows the protocol, and a second engine whose messages a test writes."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from refit_worker import Engine, shards, whole_model

from megatron_rl.config.schema import RefitConfig
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit.engine_side import EngineSide, StagedEngineSide
from megatron_rl.refit.refit_store import RefitStore
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import TransportError
from megatron_rl.weights.rank_layouts import EngineLayout, TrainerLayout

SIZES = Sizes(family="qwen2", num_layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=8, vocab=11, tied=True)
TOPOLOGY = Topology(sizes=SIZES, trainer=TrainerLayout(), engines=EngineLayout(replicas=2), dtype="float32")
SETTINGS = RefitConfig(verify="full", message_timeout_s=2.0, timeout_s=60.0)
READY = {"version": None, "location": ["host", "process", "cpu", ""]}
VOTE = {
    **dict.fromkeys(("sent", "full", "received", "local", "checked"), 0), "delta_seconds": 0.0, "seconds": 0.0,
    "lost_destinations": {}, "lost_sources": {}, "mismatch": None, "error": None, "probe": [0, 0.0],
}  # fmt: skip


class Refits:
    """A trainer with one engine that follows the protocol (rank 0). Rank 1 exists only as keys of the store."""

    def __init__(self, side: TrainerSide, engine: Engine) -> None:
        self.side, self.engine, self.version = side, engine, 0
        self.store = RefitStore.join(side.address)

    def refit(self, **messages: Any) -> dict[str, float]:
        """Makes a refit in which rank 1 has sent some messages: `hello`, `ready`, `vote` and `pulse`. A value of type
        bytes is stored as it is, any other value as JSON. Checks that rank 0 has the new weights."""
        self.version += 1
        number = self.side._number + 1
        keys = {"hello": "hello/1", "pulse": "pulse/1", "ready": f"{number}/ready/1", "vote": f"{number}/vote/1"}
        for name, value in messages.items():
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.store._client.set({keys[name]: content})
        metrics = self.side(self.version)
        assert self.engine.holds(0), "the engine that follows the protocol has lost the weights"
        return metrics


@contextlib.contextmanager
def refits() -> Iterator[Refits]:
    """Context manager that opens a trainer and its engine in this process."""
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/ranks", rank=0, world_size=1)
        try:
            parameters = shards(TOPOLOGY, 0, whole_model(SIZES, 0))
            side = TrainerSide(TOPOLOGY, SETTINGS, parameters, group=dist.group.WORLD)
            engine = Engine(TOPOLOGY, 0)
            receiver = EngineSide(RefitStore.join(side.address), 0, engine, torch.device("cpu"))
            done = threading.Event()
            thread = threading.Thread(target=_take_part, args=(receiver, done), daemon=True)
            thread.start()
            yield Refits(side, engine)
            done.set()
            thread.join()
            receiver.close()
            side.close()
        finally:
            dist.destroy_process_group()


def _take_part(receiver: EngineSide, done: threading.Event) -> None:
    with contextlib.suppress(TransportError):
        while not done.is_set():
            receiver.take_part(0.1)


def staged_engine(store: RefitStore) -> StagedEngineSide:
    """Returns an engine rank with staging memory that waits for a refit. `store`: a store without a trainer."""
    settings = {name: getattr(SETTINGS, name) for name in SETTINGS.__dataclass_fields__}
    store.put_together(
        {"setup": {"topology": TOPOLOGY.to_json(), "settings": settings | {"staging": "host"}}, "next": 1}
    )
    side = StagedEngineSide(store, 0, Engine(TOPOLOGY, 0), torch.device("cpu"))
    side.start()
    return side
