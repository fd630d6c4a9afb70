"""Servers without a model that take part in a run's real refits."""

from __future__ import annotations

from typing import Any

import torch
from fake_vllm import JOIN, UPDATE, FakeVllm
from refit_worker import Engine

from megatron_rl.refit.engine_side import EngineSide, StagedEngineSide
from megatron_rl.refit.refit_store import Address, RefitStore
from megatron_rl.refit.store_messages import Setup

DEVICE = torch.device("cpu")


class RefittedVllm(FakeVllm):
    """Receives the weights of every refit into memory of their shapes, and writes what FakeVllm does: its tokens do not
    depend on the weights, their versions do. It serves one run after the other."""

    _side: EngineSide | None = None

    def answer(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == JOIN:
            self._join(**body["init_info"])
        if path == UPDATE:
            assert self._side is not None, "it has joined no trainer"
            order = body["update_info"]
            assert self._side.take_part(order["wait_s"]) == order["version"]
        return super().answer(path, query, body)

    def close(self) -> None:
        super().close()
        self._leave()

    def _join(self, host: str, port: int, secret: str, replica: int) -> None:
        self._leave()
        store = RefitStore.join(Address(host, port, secret))
        setup = store.get("setup", Setup, 60)
        engine = Engine(setup.topology, replica)
        if setup.settings.staged:
            self._side = StagedEngineSide(store, replica, engine, DEVICE)
            self._side.start()
        else:
            self._side = EngineSide(store, replica, engine, DEVICE)

    def _leave(self) -> None:
        if self._side is not None:
            self._side.close()
        self._side = None
