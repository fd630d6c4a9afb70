"""What a step of a recipe makes its models do: how many samples of which lengths are drawn and trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from megatron_rl.config.schema import ConfigError, TrainConfig


@runtime_checkable
class Drawing(Protocol):
    """A recipe that says what its turns draw."""

    def drawn(self, role: str) -> Mapping[str, int]:
        """Samples per prompt that each role draws in a turn of `role`, in the order in which they are drawn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Completions of one role in one turn."""

    role: str
    samples: int
    prompt: float  # tokens in the mean
    response: float
    longest: int  # tokens of a completion

    @property
    def length(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True)
class Work:
    """A turn: what is drawn, and what the role trains on; `times` alike in a step."""

    role: str
    draws: Sequence[Draw]
    times: int

    @property
    def trained(self) -> Draw:
        return next(draw for draw in self.draws if draw.role == self.role)


def step_work(config: TrainConfig, recipe: Any | None, fill: float) -> list[Work]:
    """The turns of a step in the middle of the run. `fill`: mean lengths as a share of max_prompt_tokens and sampling.max_tokens.

    Without a recipe (no torch here to build it) each role has a turn that draws its `group_size`, or one sample for each prompt.
    """
    if not 0 < fill <= 1:
        raise ConfigError(f"--fill {fill}: mean lengths as a share of the longest, above 0 and at most 1")
    if recipe is None:
        turns, group = list(config.roles), config.recipe.args.get("group_size", 1)
        drawn = {name: {name: group} for name in turns}
    else:
        turns = list(recipe.turns(recipe.num_steps() // 2))
        if isinstance(recipe, Drawing):
            drawn = {name: recipe.drawn(name) for name in turns}
        else:
            drawn = {name: {name: recipe.group_sizes[name]} for name in turns}
    return [
        Work(role=name, draws=_draws(config, drawn[name], fill), times=turns.count(name))
        for name in dict.fromkeys(turns)
    ]


def _draws(config: TrainConfig, drawn: Mapping[str, int], fill: float) -> list[Draw]:
    out = []
    for name, each in drawn.items():
        role = config.roles[name]
        out.append(
            Draw(
                role=name,
                samples=config.run.prompts_per_step * each,
                prompt=fill * role.max_prompt_tokens,
                response=fill * role.sampling.max_tokens,
                longest=role.sampling.max_tokens,
            )
        )
    return out
