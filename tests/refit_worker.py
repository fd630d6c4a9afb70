"""Trainer ranks and engine processes for tests of refits: numbered weights, a changed one per version, real transports.

refit_worker.py OUT trainer JSON       under run_ranks; engines inside the ranks, or processes that join by a file with the address
refit_worker.py OUT engine JSON RANK   an engine process
refit_worker.py OUT actors JSON        under run_ranks; Megatron models and engines inside the ranks
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_weights import numbered

from megatron_rl.config import Refit
from megatron_rl.refit.base import RefitError, Tensors, TransportError
from megatron_rl.refit.board import Board
from megatron_rl.refit.engine_side import EngineSide
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.weights import copies, layouts
from megatron_rl.weights.layouts import EngineLayout
from megatron_rl.weights.rectangles import Rect
from megatron_rl.weights.sizes import Sizes

Model = dict[str, torch.Tensor]


def whole_model(sizes: Sizes, version: int) -> Model:
    """Every tensor 2-D, every element another number; each version changes one element in 100 (of version 0 all)."""
    out = {}
    for number, (name, tensor) in enumerate(numbered(sizes).items()):
        flat = (tensor if tensor.dim() > 1 else tensor[:, None]).float().clone()
        places = torch.arange(flat.numel())
        for v in range(1, version + 1):
            flat.view(-1)[places % 100 == (v + number) % 100] += 0.5 * v
        out[name] = flat
    return out


def shards(topology: Topology, rank: int, model: Model) -> Model:
    """Trainer rank's parameters."""
    found: dict[str, list[Rect]] = {}
    for holding in layouts.trainer(topology.sizes, topology.trainer):
        if rank in holding.ranks:
            for name, rect in holding.parameters:
                found.setdefault(name, []).append(rect)
    out = {}
    for name, rects in found.items():
        out[name] = torch.zeros(max(r.at_row + r.rows for r in rects), max(r.at_column + r.columns for r in rects))
        fill(out[name], rects, model)
    return out


def fill(parameter: torch.Tensor, rects: list[Rect], model: Model) -> None:
    copies.fill(parameter, rects, lambda rect: copies.from_tensor(model[rect.tensor], rect))


class Engine:
    """An endpoint that holds plain tensors. `breaks`: a parameter whose writes are lost from that refit on."""

    def __init__(self, topology: Topology, rank: int, spoiled: str | None = None) -> None:
        self.topology, self.rank, self.version, self.refits = topology, rank, None, 0
        self.own = layouts.engine_parameters(topology.sizes, topology.engines, rank)
        self.tensors = {name: torch.full(shape, -1.0, dtype=topology.torch_dtype) for name, (shape, _) in self.own.items()}
        self.targets = Tensors(self.tensors)
        if spoiled is not None:
            self.tensors[spoiled].data = self.tensors[spoiled].clone()
            self.targets = Spoiled(self.tensors, spoiled)

    def begin_refit(self) -> None:
        self.version = None
        self.refits += 1

    def commit_refit(self, version: int) -> None:
        self.version = version

    def holds(self, version: int) -> bool:
        model = whole_model(self.topology.sizes, version)
        for name, (_, rects) in self.own.items():
            for rect in rects:
                if not torch.equal(
                    copies.local(self.tensors[name], rect), copies.from_tensor(model[rect.tensor], rect).to(self.tensors[name].dtype)
                ):
                    return False
        return True


class Spoiled(Tensors):
    """Memory that keeps one wrong number in a parameter."""

    def __init__(self, tensors: Model, name: str) -> None:
        super().__init__(tensors)
        self._name = name

    def write(self, name, part, values) -> None:
        super().write(name, part, values + 1 if name == self._name else values)


class Doomed(Tensors):
    """Sends its own process a signal at the first write of a certain refit, in the middle of the transfer."""

    def __init__(self, tensors: Model, engine: Engine, refit: int, signal_name: str) -> None:
        super().__init__(tensors)
        self._engine, self._refit, self._signal = engine, refit, signal.Signals[signal_name]

    def write(self, name, part, values) -> None:
        if self._engine.refits == self._refit:
            self._refit = -1
            os.kill(os.getpid(), self._signal)
        super().write(name, part, values)


def trainer(out: Path, case: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, topology = dist.get_rank(), Topology.from_json(case["topology"])
    parameters = shards(topology, rank, whole_model(topology.sizes, 0))
    inside = case.get("inside", True)
    engine = Engine(topology, rank, case.get("spoiled")) if inside else None
    side = TrainerSide(topology, Refit(**case["settings"]), parameters, group=dist.group.WORLD, endpoint=engine)
    answers: list[Any] = []
    if not inside and rank == 0:
        (out.parent / "board.json.part").write_text(json.dumps(side.address))
        (out.parent / "board.json.part").rename(out.parent / "board.json")
    for version in case.get("versions", [0, 1, 2]):
        for name, tensor in shards(topology, rank, whole_model(topology.sizes, version)).items():
            parameters[name].copy_(tensor)
        if rank == 0:
            wait_for(out.parent, case.get("waits", {}).get(str(version)))
            (out.parent / f"starts_{version}").touch()
        dist.barrier()
        start = time.monotonic()
        try:
            figures: dict[str, Any] = side(version)
        except RefitError as error:
            figures = {"error": f"{type(error).__name__}: {error}"}
        figures |= {"took": time.monotonic() - start}
        if engine is not None:
            figures |= {"holds": engine.holds(version), "version": engine.version}
        answers.append(figures)
        if rank == 0:
            (out.parent / f"done_{version}").touch()
    if rank == 0:
        wait_for(out.parent, case.get("waits", {}).get("end"))  # the board is gone with this process
    side.close()
    return {"answers": answers}


def actors(out: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    return [actor(case) for case in cases]


def actor(case: dict[str, Any]) -> dict[str, Any]:
    """A real trained model's ranks bring engines in the same ranks to its weights, before and after an update."""
    from actor_worker import WeightedLogprobs, make_batch  # here: the other workers start without Megatron

    from megatron_rl.config import Layout, Loss, Model, Role
    from megatron_rl.megatron import parallel
    from megatron_rl.megatron.policy import MegatronPolicy

    role = Role(model=Model(path=case["path"]), layout=Layout(**case["layout"]), loss=Loss(kl_coef=0.0), micro_batch_tokens=64)
    policy = MegatronPolicy(role, parallel.create(role.layout))
    engines = EngineLayout(tp=1, replicas=dist.get_world_size(), whole=True) if case["whole"] else EngineLayout(tp=dist.get_world_size())
    topology = Topology(sizes=policy.arch, trainer=policy.trainer_layout, engines=engines, dtype="float32")
    engine = Engine(topology, dist.get_rank())
    for tensor in engine.tensors.values():  # padding is zero
        tensor.zero_()
    side = TrainerSide(topology, Refit(**case["settings"]), policy.shards(), group=policy.groups.control, endpoint=engine)
    equal, figures = [], dict[str, float]()
    for version in range(2):
        figures = side(version)
        model = {name: t if t.dim() > 1 else t[:, None] for name, t in policy.weights()}
        wanted = {name: torch.zeros(shape) for name, (shape, _) in engine.own.items()}
        for name, (_, rects) in engine.own.items():
            fill(wanted[name], rects, model)
        equal.append(all(torch.equal(engine.tensors[name], t) for name, t in wanted.items()))
        policy.update(make_batch(96), WeightedLogprobs())
    side.close()
    return {"equal": equal, "figures": figures}


def wait_for(directory: Path, names: list[str] | None) -> None:
    end = time.monotonic() + 180
    while names and not all((directory / n).exists() for n in names):
        assert time.monotonic() < end, names
        time.sleep(0.02)


def engine_process(out: Path, case: dict[str, Any], rank: int) -> None:
    """Takes part until the trainer is gone; says in OUT, a line per refit, what it holds."""
    wait_for(out.parent, ["board.json"])
    host, port = json.loads((out.parent / "board.json").read_text())
    topology = Topology.from_json(case["topology"])
    engine = Engine(topology, rank)
    naps = case.get("naps", {}).get(out.stem)  # stops itself between refits, after this version
    doom = case.get("doom", {}).get(out.stem)
    if doom:
        engine.targets = Doomed(engine.tensors, engine, *doom)
    side = EngineSide(Board.join(host, port), rank, engine, torch.device("cpu"))
    (out.parent / f"joined_{out.stem}").touch()
    with out.open("a") as file:
        while True:
            try:
                version = side.take_part(1.0)
            except TransportError:
                return
            if engine.refits and version is None:
                (out.parent / f"again_{out.stem}").touch()
            if version is not None:
                file.write(json.dumps({"version": version, "holds": engine.holds(version)}) + "\n")
                file.flush()
                (out.parent / f"holds_{out.stem}_{version}").touch()
                if version == naps:
                    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    target, what, case = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    if what == "engine":
        engine_process(target, case, int(sys.argv[4]))
    else:
        target.write_text(json.dumps({"trainer": trainer, "actors": actors}[what](target, case)))
