"""The models of an evaluation, or a teacher, as engines: inside the ranks, or behind servers that are started or
found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.chat import tokenizer_of
from megatron_rl.config.schema import Embedded, EvalConfig, GenerateConfig, Model
from megatron_rl.engines.base import Engine
from megatron_rl.engines.embedded.engine import EmbeddedEngine
from megatron_rl.engines.spread import SpreadEngine
from megatron_rl.evaluation.text_scores import DRIFT
from megatron_rl.world import TorchWorld


@dataclass(frozen=True)
class Cast:
    """The models of an evaluation, each once, however many parts it plays. All are used on the driver."""

    engines: Mapping[Model, Engine]
    readers: Mapping[Model, EmbeddedEngine]  # models whose distributions are compared
    tokenizers: Mapping[Model, Any]


def open_cast(
    config: EvalConfig, world: TorchWorld, stack: contextlib.ExitStack, environment: Mapping[str, str]
) -> Cast:
    """Loads the models, or starts their servers, which end with `stack`. Collective."""
    judging = None if config.verifier is None else config.verifier.model
    writers = _each(config.model, config.junior, judging)
    read = _each(config.model, config.junior, config.base) if DRIFT in config.measures else []
    tokenizers = {model: tokenizer_of(model) for model in _each(*writers, *read)}
    own: dict[Model, EmbeddedEngine] = {}
    embedded = isinstance(config.engine, Embedded)
    here = read if world.rank == 0 else []
    for model in _each(*writers, *here) if embedded else here:
        own[model] = EmbeddedEngine(
            model.path, max_batch=config.engine.max_batch, dtype=getattr(torch, model.dtype),
            tokenizer=tokenizers[model],
            cuda_graphs=not isinstance(config.engine, Embedded) or config.engine.cuda_graphs,
        )  # fmt: skip
        own[model].load_pretrained()
    engines: dict[Model, Engine] = {}
    if isinstance(config.engine, Embedded):
        engines |= {model: SpreadEngine(world, f"model{i}", own[model]) for i, model in enumerate(writers)}
    elif world.rank == 0:
        from megatron_rl.session.eval_servers import names_of, start

        engines |= start(config.engine, names_of(config), tokenizers, config.directory, stack, environment)
    return Cast(engines, {model: own[model] for model in read if model in own}, tokenizers)


def open_teacher(
    config: GenerateConfig, world: TorchWorld, stack: contextlib.ExitStack, environment: Mapping[str, str]
) -> tuple[Engine | None, Any]:
    """Returns (engine, tokenizer) of the model that answers; the engine is used on the driver. Collective.

    Servers that are started here end with `stack`; their logs go to the directory of the output. On other ranks than
    the driver there is no engine with servers.
    """
    model, tokenizer = config.model, tokenizer_of(config.model)
    if isinstance(config.engine, Embedded):
        own = EmbeddedEngine(
            model.path, max_batch=config.engine.max_batch, dtype=getattr(torch, model.dtype), tokenizer=tokenizer,
            cuda_graphs=config.engine.cuda_graphs,
        )  # fmt: skip
        own.load_pretrained()
        return SpreadEngine(world, "model", own), tokenizer
    if world.rank != 0:
        return None, tokenizer
    from megatron_rl.session.eval_servers import start

    directory = Path(config.output)
    return start(config.engine, {model: "model"}, {model: tokenizer}, directory, stack, environment)[model], tokenizer


def _each(*models: Model | None) -> list[Model]:
    """Returns every model once, in order."""
    return list({model: None for model in models if model is not None})
