"""`megatron-rl drift`: a run at learning rate 0, in which the gap between the engine's and the trainer's log-probs must
not grow."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World
from megatron_rl.run.checkpoint import write_json
from megatron_rl.run.run_directory import RunDirectory, RunError
from megatron_rl.session import builders
from megatron_rl.session.launch_ranks import Place
from megatron_rl.session.open_engines import Supervised, open_engines
from megatron_rl.session.run_setup import Driver, open_driver, open_world_for
from megatron_rl.spec.run_spec import RoleSpec, RunSpec
from megatron_rl.texts.chat_template import tokenizer_of
from megatron_rl.training import preflight
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.fleet import Fleet
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.lessons import Lesson
from megatron_rl.training.rank_fleet import RankFleet
from megatron_rl.training.rollouts import plain
from megatron_rl.types import Rollout

FILE_NAME = "drift.json"
QUARTERS = 4
# The mean log-prob gap counts as growing if its least-squares line rises by more than this many standard errors.
SIGMAS = 3.0
ROUNDING = 1e-6  # in nats; a rise of the mean log-prob gap below this value is float32 rounding error


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Statistics of |engine log-prob - trainer log-prob| over the sampled tokens after one weight sync, in nats."""

    version: int
    tokens: int
    mean: float
    error: float  # standard error of `mean`, computed as if responses were independent
    p99: float
    max: float
    # [QUARTERS] mean gap of the tokens in the first, second, ... quarter of each response; None without such tokens
    quarters: list[float | None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on the log-prob gaps between the engine and the trainer of a role.

    `growth` is the rise of the mean gap's least-squares line from the first to the last weight sync, and `growth_error`
    is the standard error of the rise.
    """

    growth: float
    growth_error: float
    worst: float  # largest mean gap after any weight sync
    grows: bool
    above: bool  # whether a mean gap is above preflight.max_logprob_gap or is NaN

    @property
    def passed(self) -> bool:
        return not (self.grows or self.above)


def run(spec: RunSpec, place: Place, *, updates: int) -> int:
    """Runs the drift test with `updates` updates. Every rank calls it.

    Returns the exit status: 1 if the mean log-prob gap of a role grows or is above preflight.max_logprob_gap, otherwise
    0. Raises RunError if training has already begun in the run directory.
    """
    spec = still(spec)
    with open_world_for(spec, place) as world, contextlib.ExitStack() as stack:
        world.from_leader(_refuse_begun, spec.directory)
        driver = stack.enter_context(open_driver(spec, world, place, total_iterations=None))
        tokenizers = {n: tokenizer_of(role.model) for n, role in spec.roles.items()}
        role = next(iter(spec.recipe.roles()))
        readers, _, _ = builders.prompts(
            spec.recipe, spec.data, spec.roles, tokenizers, spec.prompt_limits(role), seed=spec.run.seed
        )
        commands, ranks = Commands(world), spec.role_ranks
        policies = builders.policies(spec.roles, spec.trained_policies, spec.run, ranks=ranks)
        quiet = replace(driver, tracker=None)  # disables writing to the run's refits.jsonl
        run_engines = open_engines(
            spec.engine, tokenizers, world, commands, stack, servers=Supervised(quiet), sources=policies, ranks=ranks
        )
        no_grades = lambda responses, payloads: []  # noqa: E731  a drift test grades nothing
        context = builders.context(
            spec.roles, spec.reward, spec.loop.rollouts, run_engines.engines, tokenizers, no_grades, driver.watch,
            seed=spec.run.seed,
        )  # fmt: skip
        refits = run_engines.refits  # a critic has no engine to drift from
        trainees = {
            name: builders.trainee(spec.roles[name], spec.run, policy)
            for name, policy in policies.items() if spec.roles[name].head is None
        }  # fmt: skip
        memory = DeviceMemory(trainees, colocated=run_engines.colocated is not None)
        worlds = {name: World(policy.groups.control) for name, policy in policies.items()}
        fleet = RankFleet(
            commands, memory, refits, world_of=worlds.__getitem__, ranks=ranks, engines=run_engines.colocated
        )

        prompts = readers[role].take(spec.run.prompts_per_iteration)
        texts = [spec.recipe.prompt(prompt.payload) for prompt in prompts]
        settings, limit = spec.engine.settings, spec.loop.preflight.gap_limit

        def probe_and_conclude() -> int:
            probes = Probes(fleet, context, spec.trained_policies, texts)
            _probe(probes, fleet, refits, updates, driver.say)
            return _conclude(driver, settings.kind, limit, probes.gaps)

        return commands.drive(probe_and_conclude)


def _refuse_begun(directory: Path) -> None:
    if RunDirectory(directory).has_begun():
        raise RunError(
            f"{directory} holds a run that has begun: give the drift test a directory of its own, such as "
            "run.name=drift"
        )


def still(spec: RunSpec) -> RunSpec:
    """Returns the specification of the drift test: learning rate 0, no evaluations, and sampling from the full
    distribution at temperature 1."""

    def role(settings: RoleSpec) -> RoleSpec:
        optimizer = replace(settings.optimizer, lr=0.0, min_lr=0.0)
        return replace(
            settings,
            optimizer=optimizer,
            sampling=replace(settings.sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
        )

    roles = {name: role(settings) for name, settings in spec.roles.items()}
    return replace(
        spec,
        roles=roles,
        run=replace(spec.run, resume="auto", iterations=None),
        data=replace(spec.data, held_out=()),
        engine=replace(spec.engine, roles={name: roles[name] for name in spec.engine.roles}),
    )


def measure(counts: np.ndarray, engine: np.ndarray, trainer: np.ndarray, *, version: int) -> Gap:
    """Returns the statistics of the gap between the engine's and the trainer's log-probs.

    `engine`, `trainer`: log-probs [N] of all sampled tokens, with the responses concatenated. `counts` [S]: number of
    sampled tokens of each response.
    """
    gap = np.abs(engine - trainer).astype(np.float64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    # [N] index of the quarter of the response in which each token is
    place = (np.arange(len(gap)) - np.repeat(starts[:-1], counts)) * QUARTERS // np.repeat(counts, counts)
    sums = np.add.reduceat(gap, starts[:-1][counts > 0])  # sum of the tokens' gaps in each non-empty response
    mean = float(gap.mean())
    return Gap(
        version=version,
        tokens=len(gap),
        mean=mean,
        error=float(np.sqrt(np.square(sums - mean * counts[counts > 0]).sum()) / counts.sum()),
        p99=float(np.quantile(gap, 0.99)),
        max=float(gap.max()),
        quarters=[float(gap[place == q].mean()) if (place == q).any() else None for q in range(QUARTERS)],
    )


def judge(gaps: Sequence[Gap], limit: float) -> Verdict:
    """Returns the verdict on a role: whether the log-prob gap between engine and trainer grows, and whether it is above
    `limit`.

    `gaps`: statistics after each weight sync of the role, in order; at least two. `limit`: largest allowed mean gap in
    nats."""
    middle = (len(gaps) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(gaps)))
    # The rise of the least-squares line is a weighted sum of the mean gaps; `shares` are the weights.
    shares = [(i - middle) * (len(gaps) - 1) / spread for i in range(len(gaps))]
    growth = sum(share * gap.mean for share, gap in zip(shares, gaps, strict=True))
    error = math.sqrt(sum((share * gap.error) ** 2 for share, gap in zip(shares, gaps, strict=True)))
    grows, above = growth > max(SIGMAS * error, ROUNDING), not all(gap.mean <= limit for gap in gaps)
    worst = max(gap.mean for gap in gaps)
    return Verdict(growth=growth, growth_error=error, worst=worst, grows=grows, above=above)


class Probes:
    """Measures the gap between the engine's and the trainer's log-probs of each policy after every weight sync. The
    updates between the weight syncs have learning rate 0.

    Used on the driver (rank 0). `texts`: the prompts. `gaps`: the results.
    """

    def __init__(self, fleet: Fleet, context: RolloutContext, trained: Sequence[str], texts: Sequence[str]) -> None:
        self._fleet, self._context, self._trained, self._texts = fleet, context, trained, texts
        # {policy: rollouts sampled by the last call of `round`}; the next update is trained on these rollouts
        self._drawn: dict[str, list[Rollout]] = {}
        self.gaps: dict[str, list[Gap]] = {name: [] for name in fleet.with_engine}

    def round(self, name: str, version: int) -> Gap:
        """Updates a policy on the rollouts of the previous call, sends the policy's weights to its engine, samples new
        rollouts, and measures the log-prob gap. If `version` is 0, the update and the weight sync are left out, because
        no rollouts exist yet, and the engine has the weights already.
        """
        if version and name in self._trained:
            # Advantages alternate between 1 and -1, so that the update computes gradients that are not 0.
            rollouts = [replace(r, advantages=float(1 - 2 * (i % 2))) for i, r in enumerate(self._drawn[name])]
            lesson = Lesson(policy=name, roles=(name,), rollouts=rollouts, signal=True)
            self._fleet.update(lesson, [name]).result()
        if version:
            self._fleet.refit(name, version)
        self._fleet.generate()
        rollouts = self._drawn[name] = self._draw(name, version)
        scores = self._fleet.score(name, rollouts, ["logprobs"])
        engine, trainer = preflight.engine_and_trainer(rollouts, [values["logprobs"] for values in scores])
        counts = np.array([r.num_trainable for r in rollouts])
        self.gaps[name].append(measure(counts, engine, trainer, version=version))
        return self.gaps[name][-1]

    def _draw(self, name: str, version: int) -> list[Rollout]:
        """Returns new responses of a policy to the fixed prompts of the drift test.

        Raises PreflightFailure if no token was sampled."""
        sampling = plain(self._context.samplings[name], seed=self._context.seed_for("drift", name, version))
        rollouts = preflight.probe(self._context, name, self._texts, sampling)
        if not any(r.num_trainable for r in rollouts):
            raise preflight.PreflightFailure(
                f"{name}: no token was sampled after {len(self._texts)} prompts: look at data, max_prompt_tokens and "
                "the context"
            )
        return rollouts


def _probe(probes: Probes, fleet: Fleet, names: Iterable[str], updates: int, say: Callable[[str], None]) -> None:
    """Measures the log-prob gap of each policy before and after each update, and prints a table."""
    fleet.start({})
    quarters = (f"quarter {q + 1}" for q in range(QUARTERS))
    say(_row("role", "refit", "tokens", "mean", "p99", "max", *quarters))
    for version, name in itertools.product(range(updates + 1), names):
        gap = probes.round(name, version)
        values = (gap.mean, gap.p99, gap.max, *gap.quarters)
        cells = ["-" if value is None else f"{value:.2e}" for value in values]
        say(_row(name, str(version), str(gap.tokens), *cells))


def _conclude(driver: Driver, kind: str, limit: float, gaps: Mapping[str, Sequence[Gap]]) -> int:
    """Prints the verdict on each role, and writes drift.json. Returns the exit status: 0 if all roles pass, otherwise
    1. Called on the driver (rank 0). `kind`: engine.kind. `limit`: largest allowed mean gap in nats."""
    target = driver.directory.path / FILE_NAME
    verdicts = {name: judge(own, limit) for name, own in gaps.items()}
    for name, verdict in verdicts.items():
        grows = "GROWS" if verdict.grows else "is flat"
        above = "ABOVE" if verdict.above else "within"
        driver.say(
            f"{name}: the mean gap {grows} ({verdict.growth:+.1e} +- {verdict.growth_error:.1e} over the refits); its "
            f"greatest value, {verdict.worst:.1e}, is {above} preflight.max_logprob_gap = {limit}"
        )
    passed = all(verdict.passed for verdict in verdicts.values())
    roles = {n: {**asdict(own), "refits": [asdict(gap) for gap in gaps[n]]} for n, own in verdicts.items()}
    write_json(target, {"engine": kind, "max_logprob_gap": limit, "passed": passed, "roles": roles})
    driver.say(f"written: {target}")
    return int(not passed)


def _row(*cells: str) -> str:
    return cells[0].ljust(12) + "".join(cell.rjust(11) for cell in cells[1:])
