"""Trainer ranks and engine processes for tests of refits: numbered weights, a changed one per version, real transports.

`trainer` and `actors` run on ranks (engines inside these, or processes that join by a file with the address),
`engine_process` beside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from limits import RUN_S
from numbered import numbered
from pydantic import TypeAdapter

from megatron_rl.config.schema import RefitConfig
from megatron_rl.engines.embedded.engine_weights import WeightSlots
from megatron_rl.models.sizes import Sizes
from megatron_rl.refit import exchange, messages, shared_memory_transport
from megatron_rl.refit.engine_side import EngineSide, StagedEngineSide
from megatron_rl.refit.exchange import ExchangeOutcome, LocalSide
from megatron_rl.refit.refit_store import Address, RefitStore
from megatron_rl.refit.tcp_transport import Tcp
from megatron_rl.refit.topology import Topology
from megatron_rl.refit.trainer_side import TrainerSide
from megatron_rl.refit.transport import Deadline, RefitError, Tensors, TransportError
from megatron_rl.refit.transport_choice import RankLocation, RankLocations
from megatron_rl.weights import rank_layouts, tensor_copies
from megatron_rl.weights.parameter_mapping import Rect, hf_shapes, kept_float32
from megatron_rl.weights.quantisation import quantised_shapes
from megatron_rl.weights.quantised_values import block_scales, dequantise, quantise
from megatron_rl.weights.rank_layouts import EngineLayout

Model = dict[str, torch.Tensor]


def whole_model(sizes: Sizes, version: int) -> Model:
    """Every tensor 2-D, every element another number; each version changes one element in 100 (of version 0 all)."""
    tensors = {}
    for number, (name, tensor) in enumerate(numbered(sizes).items()):
        flat = (tensor if tensor.dim() > 1 else tensor[:, None]).float().clone()
        places = torch.arange(flat.numel())
        for v in range(1, version + 1):
            flat.view(-1)[places % 100 == (v + number) % 100] += 0.5 * v
        tensors[name] = flat
    return tensors


def shards(topology: Topology, rank: int, model: Model) -> Model:
    """Trainer rank's parameters."""
    parts: dict[str, list[Rect]] = {}
    for holding in rank_layouts.trainer(topology.sizes, topology.trainer):
        if rank in holding.ranks:
            for name, rect in holding.parameters:
                parts.setdefault(name, []).append(rect)
    tensors = {}
    for name, rects in parts.items():
        tensors[name] = torch.zeros(max(r.at_row + r.rows for r in rects), max(r.at_column + r.columns for r in rects))
        fill(tensors[name], rects, model)
    return tensors


def fill(parameter: torch.Tensor, rects: list[Rect], model: Model) -> None:
    tensor_copies.fill(parameter, rects, lambda rect: tensor_copies.from_tensor(model[rect.tensor], rect))


class Engine:
    """An endpoint that holds plain tensors. `breaks`: a parameter whose writes are lost from that refit on."""

    def __init__(self, topology: Topology, rank: int, spoiled: str | None = None) -> None:
        self.topology, self.rank, self.version, self.refits = topology, rank, None, 0
        self.own = rank_layouts.engine_parameters(topology.sizes, topology.engines, rank)
        kept = kept_float32(topology.sizes)
        self.tensors = {
            name: torch.full(shape, -1.0, dtype=torch.float32 if name in kept else topology.torch_dtype)
            for name, (shape, _) in self.own.items()
        }
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
                    tensor_copies.local(self.tensors[name], rect),
                    tensor_copies.from_tensor(model[rect.tensor], rect).to(self.tensors[name].dtype),
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

    def words(self, name, part, dtype) -> Any:
        return None if name == self._name else super().words(name, part, dtype)

    def memory(self, name, part, dtype) -> torch.Tensor | None:
        return None if name == self._name else super().memory(name, part, dtype)


class Counting(Tensors):
    """Counts the bytes that are copied into it."""

    bytes = 0

    def write(self, name, part, values) -> None:
        super().write(name, part, values)
        self.bytes += part.elements * values.dtype.itemsize


class Doomed(Tensors):
    """Sends its own process a signal at the first landing of a certain refit, in the middle of the transfer."""

    def __init__(self, tensors: Model, engine: Engine, refit: int, signal_name: str) -> None:
        super().__init__(tensors)
        self._engine, self._refit, self._signal = engine, refit, signal.Signals[signal_name]

    def write(self, name, part, values) -> None:
        self._strike()
        super().write(name, part, values)

    def memory(self, name, part, dtype) -> torch.Tensor | None:
        self._strike()
        return super().memory(name, part, dtype)

    def _strike(self) -> None:
        if self._engine.refits == self._refit:
            self._refit = -1
            os.kill(os.getpid(), self._signal)


def trainer(output_path: Path, case: dict[str, Any]) -> dict[str, Any]:
    messages.ALONE_BYTES = case.get("long") or messages.ALONE_BYTES
    dist.init_process_group("gloo")
    rank, topology = dist.get_rank(), TypeAdapter(Topology).validate_python(case["topology"])
    parameters = shards(topology, rank, whole_model(topology.sizes, 0))
    inside = case.get("inside", True)
    engine = Engine(topology, rank, case.get("spoiled")) if inside else None
    shared_memory_transport.SHARED_MEMORY = Path(case.get("shared_memory", shared_memory_transport.SHARED_MEMORY))
    side = TrainerSide(topology, RefitConfig(**case["settings"]), parameters, group=dist.group.WORLD, endpoint=engine)
    answers: list[Any] = []
    if not inside and rank == 0:
        (output_path.parent / "store.json.part").write_text(json.dumps(side.address))
        (output_path.parent / "store.json.part").rename(output_path.parent / "store.json")
    for version in case.get("versions", [0, 1, 2]):
        for name, tensor in shards(topology, rank, whole_model(topology.sizes, version)).items():
            parameters[name].copy_(tensor)
        if rank == 0:
            wait_for(output_path.parent, case.get("waits", {}).get(str(version)))
            (output_path.parent / f"starts_{version}").touch()
        dist.barrier()
        run = cannot_send if case.get("cannot_send") == [rank, version] else exchange.Exchange.run
        littered = litter() if version == case.get("litters") else []
        mib_held = anonymous_mib()
        start = time.monotonic()
        try:
            with mock.patch.object(exchange.Exchange, "run", run):
                metrics: dict[str, Any] = side(version)
        except RefitError as error:
            metrics = {"error": f"{type(error).__name__}: {error}"}
        metrics |= {
            "took": time.monotonic() - start,
            "mib_given_back": mib_held - anonymous_mib(),
            "kept": len(littered),
        }
        if not inside and rank == 0:
            metrics["keys"] = side._store._client.num_keys()
        if engine is not None:
            metrics |= {"holds": engine.holds(version), "version": engine.version}
        answers.append(metrics)
        if rank == 0:
            (output_path.parent / f"done_{version}").touch()
    if rank == 0:
        wait_for(output_path.parent, case.get("waits", {}).get("end"))  # the store is gone with this process
    side.close()
    return {"answers": answers}


def cannot_send(*_: Any) -> None:
    raise TransportError("the network is away")


def litter() -> list[bytearray]:
    """Leaves 120 MiB of freed memory in two of glibc's arenas, with something small that stays every 30 KiB. Returns
    what stays.
    """
    kept: list[bytearray] = []

    def fill_arena() -> None:
        blocks = [bytearray(600) for _ in range(100_000)]
        kept.extend(blocks[::50])

    threads = [threading.Thread(target=fill_arena) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return kept


def anonymous_mib() -> int:
    """Returns how much memory this process holds, without the pages of files."""
    line = next(entry for entry in Path("/proc/self/status").read_text().splitlines() if entry.startswith("RssAnon"))
    return int(line.split()[1]) >> 10


def actors(output_path: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    return [actor(case) for case in cases]


def actor(case: dict[str, Any]) -> dict[str, Any]:
    """A real trained model's ranks bring engines in the same ranks to its weights, before and after an update."""
    from layouts_worker import learn  # here: the other workers start without Megatron

    from megatron_rl.config.schema import Layout, LossConfig, Model, RoleConfig
    from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
    from megatron_rl.megatron import parallel
    from megatron_rl.megatron.policy import MegatronPolicy

    role = RoleConfig(
        model=Model(path=case["path"]),
        layout=Layout(**case["layout"]),
        loss=LossConfig(kl_coef=0.0),
        micro_batch_tokens=64,
    )
    policy = MegatronPolicy(role, parallel.create(role.layout))
    engines = (
        EngineLayout(tp=1, replicas=dist.get_world_size(), whole=True, quantization=case.get("quantization"))
        if case["whole"]
        else EngineLayout(tp=dist.get_world_size())
    )
    topology = Topology(sizes=policy.arch, trainer=policy.export.trainer_layout, engines=engines, dtype="float32")
    quantization = case.get("quantization")
    engine = (
        EmbeddedEngine(case["path"], quantization=quantization) if case["whole"] else Engine(topology, dist.get_rank())
    )
    if isinstance(engine, Engine):
        for tensor in engine.tensors.values():  # padding is zero
            tensor.zero_()
    side = TrainerSide(
        topology, RefitConfig(**case["settings"]), policy.export.shards(), group=policy.groups.control, endpoint=engine
    )
    equal, metrics = [], dict[str, float]()
    for version in range(2):
        metrics = side(version)
        model = {name: t if t.dim() > 1 else t[:, None] for name, t in policy.export.weights()}
        equal.append(engine.version == version and has(engine, model))
        learn(policy)
    side.close()
    return {"equal": equal, "metrics": metrics}


def has(engine: Any, model: Model) -> bool:
    """Says whether an Engine, or an embedded engine, holds exactly the weights of `model`, under Hugging Face names."""
    if isinstance(engine, Engine):
        expected = {name: torch.zeros(shape) for name, (shape, _) in engine.own.items()}
        for name, (_, rects) in engine.own.items():
            fill(expected[name], rects, model)
        return all(torch.equal(engine.tensors[name], t) for name, t in expected.items())
    names = hf_shapes(engine.arch)
    if engine._format is not None:  # the engine generates with what the trainer's weights are after quantising
        tensors, form = {}, engine._format
        for name, tensor in model.items():
            if name in quantised_shapes(engine.arch):
                tensor = dequantise(quantise(tensor, form), block_scales(tensor, form), form, tensor.dtype)
                assert not torch.equal(tensor, model[name])
            tensors[name] = tensor
        slots = WeightSlots(engine._quantised._slots)
        return all(torch.equal(slots.read(name, (0, 0, *tensors[name].shape)), tensors[name]) for name in names)
    return all(torch.equal(engine.targets.read(name, (0, 0, *model[name].shape)), model[name]) for name in names)


def late(output_path: Path) -> Any:
    """Two ranks: a message that comes after its receiver gave it up -> what its sender saw, and whether anything
    landed.
    """
    rank, store, transport = pair()
    target = torch.zeros(1 << 16, dtype=torch.uint8)
    if rank == 1:
        waiting = transport.receive(0, "a bucket", 8, torch.device("cpu"), pieces=[target])
        with contextlib.suppress(TransportError):
            waiting.wait(Deadline.start(0.1, 0.1))
            raise AssertionError("a message came that nobody sent")
        store.put("given up", True)
        store.get("sent", bool, 60)
        landed = bool(target.any())
        with contextlib.suppress(TransportError):  # the other rank may leave, and the store with it, before it answers
            store.put("seen", True)
        return landed
    store.get("given up", bool, 60)
    outcome = "sent"
    try:
        sending = transport.send(1, "a bucket", torch.ones(8, dtype=torch.uint8), pieces=[torch.ones_like(target)])
        sending.wait(Deadline.start(20.0, 20.0))
    except TransportError as error:
        outcome = str(error)
    store.put("sent", True)
    store.get("seen", bool, 60)  # the store is gone with this process
    return outcome


def one_exchange(output_path: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Two ranks, trainer and engine: one exchange without what is around it."""
    messages.ALONE_BYTES = case["long"]
    exchange.ALONE_PART_BYTES = case["part"]
    rank, _, transport = pair()
    topology = TypeAdapter(Topology).validate_python(case["topology"])
    plan = topology.plan(
        RankLocations([RankLocation("here", "0", "cpu")], {0: RankLocation("here", "1", "cpu")}), bucket_mib=0.02
    )
    engine = Engine(topology, 0)
    engine.targets = Counting(engine.tensors)
    model = whole_model(topology.sizes, 0)
    end = [
        LocalSide(source=0, sources=Tensors(shards(topology, 0, model))),
        LocalSide(destination=0, targets=engine.targets),
    ][rank]
    outcome, packed, gather = ExchangeOutcome(), [0], exchange._gather

    def counted(parameters: Any, parts: Any, gathered: torch.Tensor) -> None:
        packed[0] += gathered.numel() * gathered.element_size()
        gather(parameters, parts, gathered)

    exchange._gather = counted
    exchange.Exchange(plan, end, lambda source, destination: (transport, 1 - rank), dtype=torch.float32).run(
        exchange.RefitOrder(version=0, verify="full"), Deadline.start(30.0, 20.0), outcome
    )
    return {
        "bytes": outcome.sent + outcome.received, "planned": 4 * plan.sent, "slices": len(plan.slices),
        "checked": outcome.checked,
        "mismatch": outcome.mismatch, "copied": engine.targets.bytes, "packed": packed[0], "holds": engine.holds(0),
    }  # fmt: skip


def pair() -> tuple[int, RefitStore, Tcp]:
    """This rank of two, a store of both, and what is between them."""
    rank = int(os.environ["RANK"])
    meeting = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    if rank == 0:
        store, address = RefitStore.host("127.0.0.1")
        meeting.set("address", json.dumps(address))
        meeting.wait(["read"])  # this store ends with the function
    else:
        store = RefitStore.join(Address(*json.loads(meeting.get("address"))))
        meeting.set("read", "")
    return rank, store, Tcp(store.under("tcp"), rank, RefitConfig())


def wait_for(directory: Path, names: list[str] | None) -> None:
    end = time.monotonic() + RUN_S
    while names and not all((directory / n).exists() for n in names):
        assert time.monotonic() < end, names
        time.sleep(0.02)


def engine_process(output_path: Path, case: dict[str, Any], rank: int) -> None:
    """Takes part until the trainer is gone; says in OUT, a line per refit, what it holds."""
    messages.ALONE_BYTES = case.get("long") or messages.ALONE_BYTES
    wait_for(output_path.parent, ["store.json"])
    address = Address(*json.loads((output_path.parent / "store.json").read_text()))
    topology = TypeAdapter(Topology).validate_python(case["topology"])
    engine = Engine(topology, rank)
    sleep_count = case.get("sleep_count", {}).get(output_path.stem)  # stops itself between refits, after this version
    doom = case.get("doom", {}).get(output_path.stem)
    if doom:
        engine.targets = Doomed(engine.tensors, engine, *doom)
    side = EngineSide(RefitStore.join(address), rank, engine, torch.device("cpu"))
    (output_path.parent / f"joined_{output_path.stem}").touch()
    with output_path.open("a") as file:
        while True:
            try:
                version = side.take_part(1.0)
            except TransportError:
                return
            if engine.refits and version is None:
                (output_path.parent / f"again_{output_path.stem}").touch()
            if version is not None:
                file.write(json.dumps({"version": version, "holds": engine.holds(version)}) + "\n")
                file.flush()
                (output_path.parent / f"holds_{output_path.stem}_{version}").touch()
                if version == sleep_count:
                    os.kill(os.getpid(), signal.SIGSTOP)


class Staged(Engine):
    """An endpoint that receives into other memory than it serves. It kills its process in a state of its `dies[0]`th
    refit, `dies[1]`: transfer, vote, staged, swap or served; before, it writes down what it serves.
    """

    def __init__(self, topology: Topology, rank: int, dies: list[Any], output_path: Path) -> None:
        super().__init__(topology, rank)
        self.received = self.tensors
        self.tensors = {name: tensor.clone() for name, tensor in self.received.items()}  # what it serves
        self._dies, self._out, self._file = dies, output_path, output_path.open("a")
        self.targets = Tensors(self.received)
        if dies[1:] == ["transfer"]:
            self.targets = Doomed(self.received, self, dies[0], "SIGKILL")
            self.targets._strike = lambda: self.reach("transfer")

    def begin_refit(self) -> None:
        self.refits += 1

    def commit_refit(self, version: int) -> None:
        for number, (name, tensor) in enumerate(self.received.items()):
            if number == len(self.received) // 2 and self._dies == [self.refits, "swap"]:
                os.kill(os.getpid(), signal.SIGKILL)
            self.tensors[name].copy_(tensor)
        self.version = version
        self.note()
        self.reach("served")

    def note(self, **more: Any) -> None:
        self._file.write(json.dumps({"version": self.version, "holds": self.holds(self.version)} | more) + "\n")
        self._file.flush()
        (self._out.parent / f"holds_{self._out.stem}_{self.version}").touch()

    def reach(self, state: str) -> None:
        if self._dies == [self.refits, state]:
            self.note(dies=state)
            os.kill(os.getpid(), signal.SIGKILL)


def staged_engine(output_path: Path, case: dict[str, Any], rank: int) -> None:
    """Receives the weights of every refit beside those that it serves, and swaps them, until the trainer is gone."""
    wait_for(output_path.parent, ["store.json"])
    address = Address(*json.loads((output_path.parent / "store.json").read_text()))
    engine = Staged(
        TypeAdapter(Topology).validate_python(case["topology"]),
        rank,
        case["dies"].get(output_path.stem, []),
        output_path,
    )
    side = StagedEngineSide(RefitStore.join(address), rank, engine, torch.device("cpu"))
    put = side._store.put

    def put_and_maybe_die(key: str, value: Any) -> None:
        put(key, value)
        if "/vote/" in key:
            engine.reach("vote")

    side._store.put = put_and_maybe_die
    side.start()
    (output_path.parent / f"joined_{output_path.stem}").touch()
    while side._thread.is_alive():
        with side._change:
            side._change.wait_for(lambda: side._results, 0.1)
        if side._results:
            engine.reach("staged")
            side.take_part(0.0)
    engine.note(gone=True)
