"""Finds the sizes of a role's model (by config.json, public name or file) and how its parameters are cut into ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import ConfigError, Layout, TrainConfig
from megatron_rl.weights.layouts import TrainerLayout
from megatron_rl.weights.models import KNOWN
from megatron_rl.weights.rectangles import Shard, megatron, megatron_names
from megatron_rl.weights.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's sizes, and how many of its experts a token sees."""

    name: str
    sizes: Sizes
    active: int = 0  # experts that a token sees; 0 for a dense model
    guessed: bool = False  # the sizes come from a name that only resembles a public one


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
    layers = len(stage_layers(sizes, parallel)[stage])
    ends = {"first": stage == 0, "last": stage == parallel.pp - 1, "fused": False}
    outside = _elements(sizes, parallel, (), ends, experts=0)
    layer = _elements(sizes, parallel, (0,), ends, experts=sizes.experts // parallel.ep)
    return ParameterCounts(dense=outside.dense + layers * (layer.dense - outside.dense), expert=layers * layer.expert)


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


def _elements(
    sizes: Sizes, parallel: Parallel, layers: tuple[int, ...], ends: Mapping[str, bool], *, experts: int
) -> ParameterCounts:
    shard = Shard(tp=parallel.tp, expert_tp=parallel.etp)
    names = megatron_names(sizes, layers, range(min(experts, 1)), **ends)  # all experts are alike: one stands for all
    found = {name: prod(megatron(sizes, name, shard)[0]) for name in names}
    own = sum(size for name, size in found.items() if ".mlp.experts." in name)
    return ParameterCounts(dense=sum(found.values()) - own, expert=own * experts)


def _dense(family: str, numbers: tuple[int, ...], *, vocab: int, tied: bool = False, head_dim: int = 0) -> Sizes:
    layers, hidden, heads, kv_heads, ffn = numbers
    return Sizes(
        family=family, num_layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads, ffn=ffn, vocab=vocab, tied=tied,
    )  # fmt: skip


_MIXTRAL = Sizes(
    family="mixtral", num_layers=56, hidden=6144, heads=48, kv_heads=8, head_dim=128, ffn=16384, vocab=32768,
    tied=False, experts=8, expert_ffn=16384,
)  # fmt: skip
# Public models by name without owner and variant: (sizes as published, experts of a token).
PUBLIC: dict[str, tuple[Sizes, int]] = {
    "qwen2.5-0.5b": (_dense("qwen2", (24, 896, 14, 2, 4864), vocab=151936, tied=True), 0),
    "qwen2.5-1.5b": (_dense("qwen2", (28, 1536, 12, 2, 8960), vocab=151936, tied=True), 0),
    "qwen2.5-3b": (_dense("qwen2", (36, 2048, 16, 2, 11008), vocab=151936, tied=True), 0),
    "qwen2.5-7b": (KNOWN["qwen2.5-7b"], 0),
    "qwen2.5-14b": (_dense("qwen2", (48, 5120, 40, 8, 13824), vocab=152064), 0),
    "qwen2.5-32b": (KNOWN["qwen2.5-32b"], 0),
    "qwen2.5-72b": (_dense("qwen2", (80, 8192, 64, 8, 29568), vocab=152064), 0),
    "qwen3-0.6b": (_dense("qwen3", (28, 1024, 16, 8, 3072), vocab=151936, tied=True, head_dim=128), 0),
    "qwen3-1.7b": (_dense("qwen3", (28, 2048, 16, 8, 6144), vocab=151936, tied=True, head_dim=128), 0),
    "qwen3-4b": (_dense("qwen3", (36, 2560, 32, 8, 9728), vocab=151936, tied=True, head_dim=128), 0),
    "qwen3-8b": (_dense("qwen3", (36, 4096, 32, 8, 12288), vocab=151936, head_dim=128), 0),
    "qwen3-14b": (_dense("qwen3", (40, 5120, 40, 8, 17408), vocab=151936, head_dim=128), 0),
    "qwen3-32b": (_dense("qwen3", (64, 5120, 64, 8, 25600), vocab=151936, head_dim=128), 0),
    "qwen3-30b-a3b": (KNOWN["qwen3-30b-a3b"], 8),
    "qwen3-235b-a22b": (KNOWN["qwen3-235b-a22b"], 8),
    "llama-3.2-1b": (_dense("llama", (16, 2048, 32, 8, 8192), vocab=128256, tied=True), 0),
    "llama-3.2-3b": (_dense("llama", (28, 3072, 24, 8, 8192), vocab=128256, tied=True), 0),
    "llama-3.1-8b": (KNOWN["llama3-8b"], 0),
    "llama-3.1-70b": (KNOWN["llama3-70b"], 0),
    "mistral-7b": (_dense("mistral", (32, 4096, 32, 8, 14336), vocab=32768), 0),
    "mixtral-8x7b": (KNOWN["mixtral-8x7b"], 2),
    "mixtral-8x22b": (_MIXTRAL, 2),
    "moe-1t": (KNOWN["moe-1t"], 8),
}


def read_shape(source: str) -> Shape:
    """Reads a model's shape from its directory or config.json, or by a public name (`Qwen/Qwen2.5-Math-7B`).

    A path with the words of a public model (`runs/sft_qwen2.5_math_7b/model`) is taken for that model and marked
    `guessed`. Raises ConfigError when nothing of it is known.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_file(file)
    fits = [name for name in PUBLIC if _words(name) <= _words(source)]
    if not fits:
        raise ConfigError(
            f"no config.json at {source}, and no public model of this name is known here ({', '.join(PUBLIC)}): "
            "give its sizes with --shape ROLE=FILE (a config.json, or a directory with one) or --shape ROLE=NAME"
        )
    name = max(fits, key=len)
    return Shape(name=name, sizes=PUBLIC[name][0], active=PUBLIC[name][1], guessed=source.count("/") > 1)


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
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a model's config.json: {error}") from error
    sizes = Sizes.read(facts, str(file))
    if sizes.experts and "num_experts_per_tok" not in facts:
        raise ConfigError(f"{file}: num_experts_per_tok is missing, which a model with experts must have")
    name = file.parent.name if file.name == "config.json" else file.stem
    return Shape(name=name, sizes=sizes, active=int(facts["num_experts_per_tok"]) if sizes.experts else 0)


def _words(name: str) -> set[str]:
    """Splits a name: `Meta-Llama-3.1-8B-Instruct` gives {meta, llama, 3.1, 8b, instruct}."""
    return set(re.findall(r"\d+x\d+b|a?\d+(?:\.\d+)?b|\d+(?:\.\d+)?|[a-z]+", name.lower()))
