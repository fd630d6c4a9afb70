"""`megatron-rl drift`: a run at learning rate 0, in which the gap between engine and trainer log-probs must stay what it is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import checks as config_checks
from megatron_rl.config import plugins
from megatron_rl.config.schema import Debug, RoleConfig, TrainConfig
from megatron_rl.rewards.pool import Graded
from megatron_rl.run.checkpoint import write_json
from megatron_rl.run.directory import RunDirectory, RunError
from megatron_rl.session import parts
from megatron_rl.session.common import open_driver, open_world
from megatron_rl.session.fleet import open_fleet
from megatron_rl.session.launch import Place, run_directory
from megatron_rl.text import load_tokenizer
from megatron_rl.training import gate, loop
from megatron_rl.training.rollouts import plain
from megatron_rl.training.turns import Players, Recipe
from megatron_rl.types import Batch, Trajectory, pack
from megatron_rl.world import TorchWorld

FILE_NAME = "drift.json"
QUARTERS = 4
SIGMAS = 3.0  # a mean gap grows when its line through the refits rises by more than so many standard errors
ROUNDING = 1e-6  # nats: what rises by less is float32


@dataclass(frozen=True, kw_only=True)
class Gap:
    """|engine - trainer| log-prob of sampled tokens after one refit, in nats."""

    version: int
    tokens: int
    mean: float
    error: float  # standard error of `mean`, as if sequences were independent
    p99: float
    max: float
    quarters: list[
        float | None
    ]  # [QUARTERS] mean over the first quarter of each response, ..., over the last; None: no such token


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a role's gaps say. `growth`: of the mean gap's line from the first to the last refit, with its standard error."""

    growth: float
    growth_error: float
    worst: float  # greatest mean
    grows: bool
    above: bool  # gate.max_logprob_gap, or not a number


def run(config: TrainConfig, place: Place, *, updates: int) -> int:
    """Every rank runs it. Returns 1 when a role's mean gap grows or is above gate.max_logprob_gap.

    Raises RunError for a run directory in which training has begun.
    """
    config = still(config)
    recipe: Recipe = plugins.build(config.recipe)
    config_checks.check_recipe(config, recipe)
    with open_world(place, run_directory(config)) as world:
        return _run(config, world, place, recipe, updates)


def still(config: TrainConfig) -> TrainConfig:
    """The config at learning rate 0, every role drawing from its whole distribution at temperature 1."""

    def role(settings: RoleConfig) -> RoleConfig:
        optimizer = replace(settings.optimizer, lr=0.0, min_lr=0.0)
        return replace(
            settings,
            optimizer=optimizer,
            sampling=replace(settings.sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
        )

    own = replace(config.run, resume="auto", steps=None)
    evaluation = replace(config.evaluation, prompts=None)
    roles = {name: role(settings) for name, settings in config.roles.items()}
    return replace(config, roles=roles, run=own, evaluation=evaluation, debug=Debug())


def measure(batch: Batch, engine: Tensor, trainer: Tensor, *, version: int) -> Gap:
    """`engine` and `trainer`: log-probs where `batch.mask` is True, in order."""
    gap = (engine - trainer).abs().double()
    counts = torch.stack([part.sum() for part in batch.mask.split(batch.lengths.tolist())])  # [S] sampled tokens
    place = torch.cat(
        [torch.arange(n) * QUARTERS // max(1, n) for n in counts.tolist()]
    )  # of every sampled token: its quarter
    sums = torch.stack([part.sum() for part in gap.split(counts.tolist())])  # [S]
    mean = float(gap.mean())
    return Gap(
        version=version,
        tokens=len(gap),
        mean=mean,
        error=float((sums - mean * counts).square().sum().sqrt() / counts.sum()),
        p99=float(gap.quantile(0.99)),
        max=float(gap.max()),
        quarters=[float(gap[place == q].mean()) if bool((place == q).any()) else None for q in range(QUARTERS)],
    )


def judge(gaps: Sequence[Gap], limit: float) -> Verdict:
    """[refits] of one role, two at least."""
    middle = (len(gaps) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(gaps)))
    shares = [
        (i - middle) * (len(gaps) - 1) / spread for i in range(len(gaps))
    ]  # of each mean in the rise of the line of least squares
    growth = sum(share * gap.mean for share, gap in zip(shares, gaps, strict=True))
    error = math.sqrt(sum((share * gap.error) ** 2 for share, gap in zip(shares, gaps, strict=True)))
    return Verdict(
        growth=growth,
        growth_error=error,
        worst=max(gap.mean for gap in gaps),
        grows=growth > max(SIGMAS * error, ROUNDING),
        above=not all(gap.mean <= limit for gap in gaps),
    )


class Probes:
    """Updates, refits and probes of all roles, one round after the other. The same on every rank; `texts` of the driver count."""

    def __init__(
        self, world: TorchWorld, players: Players, roles: Mapping[str, loop.Role], trained: Sequence[str], texts: Sequence[str]
    ) -> None:  # fmt: skip
        self._world, self._players, self._roles, self._trained, self._texts = world, players, roles, trained, texts
        self._drawn: dict[str, list[Trajectory]] = {}  # in the round before
        self.gaps: dict[str, list[Gap]] = {name: [] for name in roles}

    def round(self, name: str, version: int) -> Gap:
        """Collective. Version 0 is a refit without an update before it."""
        role = self._roles[name]
        if version and name in self._trained:
            if role.sleeps:
                role.policy.wake()
            loop.update(role, _with_advantages(self._drawn[name]))
        assert role.refit is not None
        role.refit(version)
        if version and name in self._trained and role.sleeps:
            role.policy.sleep()
        self._drawn[name] = self._world.from_driver(self._draw, name, version)
        batch = pack(self._drawn[name])
        if not batch.mask.any():
            raise gate.GateFailure(
                f"{name}: no token was sampled after {len(self._texts)} prompts: look at data, max_prompt_tokens and the context"
            )
        gap = measure(batch, *gate.both_logprobs(role.policy, batch), version=version)
        self.gaps[name].append(gap)
        return gap

    def _draw(self, name: str, version: int) -> list[Trajectory]:
        """The same prompts in every round, drawn anew."""
        sampling = plain(self._players.samplings[name], seed=self._players.seed_for("drift", name, version))
        return gate.probe(self._players, name, self._texts, sampling)


def _run(config: TrainConfig, world: TorchWorld, place: Place, recipe: Recipe, updates: int) -> int:
    world.from_driver(_refuse_a_begun_run, RunDirectory(Path(config.run.dir) / config.run.name))
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(open_driver(config, world, place, total_turns=None))
        tokenizers = {
            name: load_tokenizer(role.model.tokenizer or role.model.path) for name, role in config.roles.items()
        }
        readers, _ = parts.prompts(config, recipe, tokenizers)
        policies = parts.policies(config, recipe)
        fleet = open_fleet(
            config, world, tokenizers, policies, replace(driver, tracker=None), stack
        )  # the run's refits.jsonl is not ours
        players = parts.players(config, fleet.engines, tokenizers, _nothing_to_grade, driver)
        roles = {name: parts.role(config, name, policy, fleet.refits[name]) for name, policy in policies.items()}
        prompts = readers[recipe.prompt_role].take(config.run.prompts_per_step) if world.rank == 0 else []
        probes = Probes(world, players, roles, recipe.trained, [recipe.generator_prompt(p.payload) for p in prompts])
        driver.say(
            _row("role", "refit", "tokens", "mean", "p99", "max", *(f"quarter {q + 1}" for q in range(QUARTERS)))
        )
        for version in range(updates + 1):
            for name in roles:
                driver.say(_gap_row(name, probes.round(name, version)))
        verdicts = {name: judge(gaps, config.gate.max_logprob_gap) for name, gaps in probes.gaps.items()}
        for name, verdict in verdicts.items():
            driver.say(_sentence(name, verdict, config.gate.max_logprob_gap))
        if world.rank == 0:
            _write(driver.directory.path / FILE_NAME, config, probes.gaps, verdicts)
            driver.say(f"written: {driver.directory.path / FILE_NAME}")
    return int(any(verdict.grows or verdict.above for verdict in verdicts.values()))


def _with_advantages(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """1 and -1 by turns: gradients that would move the weights, were the rate not 0."""
    return [
        replace(t, advantages=[float(s) * (1 - 2 * (i % 2)) for s in t.trainable]) for i, t in enumerate(trajectories)
    ]


def _refuse_a_begun_run(directory: RunDirectory) -> None:
    if directory.has_begun():
        raise RunError(
            f"{directory.path} holds a run that has begun: give the drift test a directory of its own, such as run.name=drift"
        )


def _nothing_to_grade(responses: Sequence[str], payloads: Sequence[Mapping[str, Any]]) -> list[Graded]:
    raise AssertionError("a drift test grades nothing")


def _write(path: Path, config: TrainConfig, gaps: Mapping[str, Sequence[Gap]], verdicts: Mapping[str, Verdict]) -> None:
    roles = {name: {**asdict(verdicts[name]), "refits": [asdict(gap) for gap in gaps[name]]} for name in gaps}
    passed = not any(verdict.grows or verdict.above for verdict in verdicts.values())
    write_json(
        path,
        {
            "engine": config.engine.kind,
            "max_logprob_gap": config.gate.max_logprob_gap,
            "passed": passed,
            "roles": roles,
        },
    )


def _row(*cells: str) -> str:
    return cells[0].ljust(12) + "".join(cell.rjust(11) for cell in cells[1:])


def _gap_row(name: str, gap: Gap) -> str:
    values = ["-" if value is None else f"{value:.2e}" for value in (gap.mean, gap.p99, gap.max, *gap.quarters)]
    return _row(name, str(gap.version), str(gap.tokens), *values)


def _sentence(name: str, verdict: Verdict, limit: float) -> str:
    grows = "GROWS" if verdict.grows else "is flat"
    above = "ABOVE" if verdict.above else "within"
    return (
        f"{name}: the mean gap {grows} ({verdict.growth:+.1e} +- {verdict.growth_error:.1e} over the refits); its greatest value, "
        f"{verdict.worst:.1e}, is {above} gate.max_logprob_gap = {limit}"
    )
