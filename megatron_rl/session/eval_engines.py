"""The models of an evaluation as engines: inside its ranks, or behind servers that it starts or finds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.config.schema import Embedded, EvalConfig, Model
from megatron_rl.engines.base import Engine
from megatron_rl.engines.embedded.engine import EmbeddedEngine
from megatron_rl.engines.spread import SpreadEngine
from megatron_rl.evaluation.text_scores import DRIFT, LEGIBILITY
from megatron_rl.text import load_tokenizer
from megatron_rl.world import TorchWorld


@dataclass(frozen=True)
class Cast:
    """The models of an evaluation, each once, however many parts it plays. Engines and scorers are used on the driver."""

    engines: Mapping[Model, Engine]
    scorers: Mapping[Model, EmbeddedEngine]  # of the measures that need distributions
    tokenizers: Mapping[Model, Any]


def open_cast(
    config: EvalConfig, world: TorchWorld, stack: contextlib.ExitStack, environment: Mapping[str, str]
) -> Cast:
    """Collective. Servers that were started here end with `stack`."""
    judging = None if config.verifier is None else config.verifier.model
    writers = _each(config.model, config.junior, judging)
    scored = _each(config.model, config.junior, config.base) if {LEGIBILITY, DRIFT} & set(config.measures) else []
    tokenizers = {model: load_tokenizer(model.tokenizer or model.path) for model in _each(*writers, *scored)}
    own: dict[Model, EmbeddedEngine] = {}
    embedded = isinstance(config.engine, Embedded)
    here = scored if world.rank == 0 else []
    for model in _each(*writers, *here) if embedded else here:
        batch = config.engine.max_batch
        own[model] = EmbeddedEngine(
            model.path, max_batch=batch, dtype=getattr(torch, model.dtype), tokenizer=tokenizers[model]
        )
        own[model].load_pretrained()
    engines: dict[Model, Engine] = {}
    if isinstance(config.engine, Embedded):
        engines |= {model: SpreadEngine(world, f"model{i}", own[model]) for i, model in enumerate(writers)}
    elif world.rank == 0:
        from megatron_rl.session.eval_servers import start

        engines |= start(config, config.engine, writers, tokenizers, stack, environment)
    return Cast(engines, {model: own[model] for model in scored if model in own}, tokenizers)


def _each(*models: Model | None) -> list[Model]:
    """Every model once, in order."""
    return list({model: None for model in models if model is not None})
