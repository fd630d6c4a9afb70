"""Says how many samples one step of a recipe draws and trains on, and how long they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import checks as config_checks
from megatron_rl.config.schema import ConfigError, TrainConfig, Use


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The completions of one role in one turn."""

    role: str
    samples: int
    prompt: float  # mean tokens of a prompt
    response: float  # mean tokens of a completion
    longest: int  # most tokens of a completion

    @property
    def length(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True)
class TurnWork:
    """A turn: the samples that are drawn in it. The role's own are trained on. A step has it `times` times."""

    role: str
    draws: Sequence[Draw]
    times: int

    @property
    def trained(self) -> Draw:
        return next(draw for draw in self.draws if draw.role == self.role)


def step_work(config: TrainConfig, recipe: Any | None, fill: float) -> list[TurnWork]:
    """Returns the turns of a step in the middle of the run.

    `fill` is the mean length as a share of max_prompt_tokens and sampling.max_tokens. Without a recipe (there is no
    torch here to build it) each role has a turn that draws its `group_size`, or one sample for each prompt. Raises
    ConfigError for a `fill` outside (0, 1].
    """
    if not 0 < fill <= 1:
        raise ConfigError(f"--fill {fill}: mean lengths as a share of the longest, above 0 and at most 1")
    if recipe is None:
        turns, group = list(config.roles), config.recipe.args.get("group_size", 1)
        drawn = {name: {name: group} for name in turns}
    else:
        schedule, parts = recipe.schedule(), recipe.roles()
        turns = [name for roles in schedule[len(schedule) // 2] for name in roles]
        drawn = {name: parts[name].drawn or {name: parts[name].samples} for name in turns}
    return [
        TurnWork(role=name, draws=_draws(config, drawn[name], fill), times=turns.count(name))
        for name in dict.fromkeys(turns)
    ]


def build_recipe(config: TrainConfig) -> tuple[Any | None, list[str]]:
    """Builds the config's recipe. Without torch, which its module may import, returns None and a note that says so."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return None, [
            "torch is not installed here: the recipe was not built, "
            "each role's turn is taken to draw group_size samples of its own"
        ]
    from megatron_rl.config import plugins

    recipe = plugins.build(Use(target=config.recipe.target, args=config.recipe.args))
    config_checks.check_recipe(config, recipe)
    return recipe, []


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
