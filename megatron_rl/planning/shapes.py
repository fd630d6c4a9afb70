"""Finds the sizes of a role's model (by config.json, public name or file) and how its parameters are cut into ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from megatron_rl.config.base import read_object
from megatron_rl.config.schema import ConfigError, Layout, Lora, TrainConfig
from megatron_rl.models import registry
from megatron_rl.models.adapters import adapted
from megatron_rl.models.rows import Row
from megatron_rl.models.sizes import Features, Sizes
from megatron_rl.weights.layouts import TrainerLayout


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's sizes and features."""

    name: str
    sizes: Sizes
    features: Features = Features()
    guessed: bool = False  # the sizes come from a name that only resembles a public one

    @property
    def active(self) -> int:
        """Returns how many experts a token sees; 0 for a dense model."""
        return self.features.experts_per_token


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A model's layout over `world` ranks: config.schema.Layout with every default resolved."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, layout: Layout, world: int, *, experts: bool) -> Parallel:
        """Resolves `layout` on `world` ranks. Raises ConfigError when it does not divide them."""
        made = cls(
            world=world,
            tp=layout.tp,
            pp=layout.pp,
            vpp=layout.vpp or 1,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.expert_tp if experts else 1,
            sequence_parallel=layout.sequence_parallel,
        )
        for what, ranks in (("tp x pp x cp", made.model_ranks), ("etp x ep x pp", made.etp * made.ep * made.pp)):
            if world % ranks:
                raise ConfigError(
                    f"{what} = {ranks} does not divide the {world} GPUs of the trainer: change the layout or cluster"
                )
        return made

    @property
    def model_ranks(self) -> int:
        """Returns the number of ranks that hold the dense parameters once, copies along the context counted."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Returns the number of data-parallel replicas."""
        return self.world // self.model_ranks

    @property
    def expert_dp(self) -> int:
        """Returns the number of ranks that hold the same experts."""
        return self.world // (self.etp * self.ep * self.pp)

    def __str__(self) -> str:
        parts = {
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp,
            "cp": self.cp,
            "ep": self.ep,
            "etp": self.etp if self.ep > 1 else 1,
        }
        words = [f"{name}{size}" for name, size in parts.items() if size > 1] + (
            ["sp"] if self.sequence_parallel else []
        )
        return " ".join([*words, f"dp{self.dp}"])


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """The number of parameters of one rank: dense ones (router and shared experts among them), and its experts'."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        return self.dense + self.expert


@lru_cache(maxsize=4096)
def counts(shape: Shape, parallel: Parallel, stage: int = 0) -> ParameterCounts:
    """Returns what Megatron allocates on a rank of pipeline stage `stage`, vocabulary padding included."""
    sizes = shape.sizes
    outside = registry.ends(sizes)
    rows = [*(outside.first if stage == 0 else ()), *(outside.last if stage == parallel.pp - 1 else ())]
    dense = sum(_elements(row, parallel) for row in rows if not (row.copy and stage == 0))
    expert = 0
    layers = [registry.layer_rows(sizes, layer) for layer in stage_layers(sizes, parallel)[stage]]
    for like, number in Counter(map(id, layers)).items():  # equal layers are one object
        own = next(rows for rows in layers if id(rows) == like)
        dense += number * sum(_elements(row, parallel) for row in own if not row.experts)
        expert += number * sum(_elements(row, parallel) * row.experts // parallel.ep for row in own if row.experts)
    return ParameterCounts(dense=dense, expert=expert)


def adapter_elements(shape: Shape, parallel: Parallel, lora: Lora, stage: int = 0) -> int:
    """Returns the numbers of A and B that a rank of pipeline stage `stage` holds."""
    layers = stage_layers(shape.sizes, parallel)[stage]
    own = (p.elements(lora.rank, parallel.tp) for layer in layers for p in adapted(shape.sizes, layer, lora))
    return int(sum(own))


def stage_layers(sizes: Sizes, parallel: Parallel) -> list[list[int]]:
    """Returns the layer numbers of every pipeline stage."""
    return TrainerLayout(pp=parallel.pp, vpp=parallel.vpp).layers(sizes)


def heaviest(shape: Shape, parallel: Parallel) -> int:
    """Returns the pipeline stage with the most parameters."""
    return max(range(parallel.pp), key=lambda stage: counts(shape, parallel, stage).all)


def total(shape: Shape) -> int:
    """Returns the number of the model's parameters, a tied output layer counted once."""
    return counts(shape, Parallel(world=1)).all


def active(shape: Shape) -> int:
    """Returns the number of parameters that one token is multiplied with.

    The embedding is not counted; the output layer and `shape.active` experts are.
    """
    found, sizes = counts(shape, Parallel(world=1)), shape.sizes
    experts = found.expert * shape.active // sizes.experts if sizes.experts else 0
    return found.dense + experts - (0 if sizes.tied else sizes.vocab * sizes.hidden)


def _elements(row: Row, parallel: Parallel) -> int:
    """Returns the elements of a parameter on a rank; of a row of experts, those of one expert."""
    return prod(row.cut.held(row.sources, parallel.etp if row.experts else parallel.tp, 0)[0])


def read_shape(source: str) -> Shape:
    """Reads a model's shape from its directory or config.json, or by a public name (`Qwen/Qwen2.5-Math-7B`).

    A path with the words of a public model (`runs/sft_qwen2.5_math_7b/model`) is taken for that model and marked
    `guessed`. Raises ConfigError when nothing of it is known.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_file(file)
    public = registry.known()
    fits = [name for name in public if _words(name) <= _words(source)]
    if not fits:
        raise ConfigError(
            f"no config.json at {source}, and no public model of this name is known here ({', '.join(public)}): "
            "give its sizes with --shape ROLE=FILE (a config.json, or a directory with one) or --shape ROLE=NAME"
        )
    name = max(fits, key=len)
    guessed = source.count("/") > 1
    sizes, features = registry.read(public[name], name), registry.features(public[name], name)
    return Shape(name=name, sizes=sizes, features=features, guessed=guessed)


def models_of(config: TrainConfig, given: Sequence[str]) -> dict[str, Shape]:
    """Returns the shape of every role's model. `given`: ROLE=SOURCE where sizes do not come from the model's path.

    Raises ConfigError for another form, and for a model of which nothing is known.
    """
    sources = {name: role.model.path for name, role in config.roles.items()}
    for word in given:
        name, _, source = word.partition("=")
        if name not in sources or not source:
            raise ConfigError(f"--shape {word}: it has the form ROLE=SOURCE, the roles are {', '.join(sources)}")
        sources[name] = source
    return {name: read_shape(source) for name, source in sources.items()}


def guess_notes(models: Mapping[str, Shape]) -> list[str]:
    """Returns a line for every role whose model's sizes are guessed."""
    return [
        f"{name}: sizes are those of {shape.name}, by the words of its path; if it is another model: --shape {name}=..."
        for name, shape in models.items()
        if shape.guessed
    ]


def _from_file(file: Path) -> Shape:
    facts = read_object(file)
    name = file.parent.name if file.name == "config.json" else file.stem
    where = str(file)
    return Shape(name=name, sizes=registry.read(facts, where), features=registry.features(facts, where))


def _words(name: str) -> set[str]:
    """Splits a name: `Meta-Llama-3.1-8B-Instruct` gives {meta, llama, 3.1, 8b, instruct}."""
    return set(re.findall(r"\d+x\d+b|a?\d+(?:\.\d+)?b|\d+(?:\.\d+)?|[a-z]+", name.lower()))
