"""The step-0 gate: the reward tells right from wrong, and every engine agrees with its trainer, before anything is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from torch import Tensor

from megatron_rl.config.schema import Gate
from megatron_rl.engines.base import Sampling
from megatron_rl.text import fill
from megatron_rl.training.rollouts import sample, tokenize
from megatron_rl.training.turns import Grade, Players, Recipe
from megatron_rl.types import Batch, Prompt, Trajectory, pack
from megatron_rl.world import World

PROBE_TOKENS = 64  # sampled per prompt for the comparison of log-probs
RIGHT_SHARE, WRONG_SHARE = (
    0.75,
    0.25,
)  # of known right answers that must be accepted at least, of known wrong ones at most


class GateFailure(RuntimeError):
    """Training would learn from wrong numbers; the message gives both values."""


@dataclass(frozen=True, kw_only=True)
class GatePlan:
    """What the gate is tried on; `prompts` of the driver count."""

    settings: Gate
    prompts: Sequence[Prompt]
    wrong_answer: str = "-123456.789"
    answer_format: str = "<answer>\\boxed{{answer}}</answer>"


class Scorer(Protocol):
    def logprobs(self, batch: Batch) -> Tensor: ...


def check_reward(grade: Grade, prompts: Sequence[Prompt], wrong_answer: str, answer_format: str) -> dict[str, float]:
    """Grades `answer_format` with each problem's own answer and with `wrong_answer` in it. -> mean scores. On the driver.

    Raises GateFailure when less than RIGHT_SHARE of the right ones or more than WRONG_SHARE of the wrong ones is accepted.
    """
    payloads = [p.payload for p in prompts]
    scores = {}
    for name, answers in (("right", [str(p["answer"]) for p in payloads]), ("wrong", [wrong_answer] * len(payloads))):
        responses = [fill(answer_format, answer=a) for a in answers]
        graded = grade(responses, payloads)
        scores[name] = fmean(g.score for g in graded)
        failures = [g.detail for g in graded if g.detail]
        if name == "right" and scores[name] < RIGHT_SHARE or name == "wrong" and scores[name] > WRONG_SHARE:
            raise GateFailure(
                f"the reward gives {scores[name]:.2f} on average to {len(answers)} known {name} answers, e.g. to the response "
                f"{responses[0]!r} for the gold answer {payloads[0]['answer']!r} (right ones need at least {RIGHT_SHARE}, wrong ones at "
                f"most {WRONG_SHARE}"
                f"{'; failures: ' + failures[0] if failures else ''}): look at data.fields, data.answer_pattern and reward.target, say in "
                "reward.answer_format how a response states its answer, or switch these checks off by gate.enabled=false"
            )
    return {"gate/reward_right": scores["right"], "gate/reward_wrong": scores["wrong"]}


def check_logprobs(
    world: World, players: Players, policies: Mapping[str, Scorer], *, texts: Sequence[str], limit: float
) -> dict[str, float]:  # fmt: skip
    """Mean |engine - trainer| log-prob over tokens sampled after `texts`, per role. Collective; engines hold the policies' weights.

    Raises GateFailure on every rank for the first role whose gap is above `limit`.
    """
    gaps = {}
    for role, policy in policies.items():
        batch = pack(world.from_driver(_short_probe, players, role, texts))
        engine, trainer = both_logprobs(policy, batch)
        gap = float((engine - trainer).abs().mean())
        if not gap <= limit:
            worst = int((engine - trainer).abs().argmax())
            raise GateFailure(
                f"{role}: the engine's log-probs differ from the trainer's by {gap:.4f} on average "
                f"(engine {float(engine.mean()):.4f}, trainer {float(trainer.mean()):.4f}; "
                f"worst token: engine {float(engine[worst]):.4f}, trainer {float(trainer[worst]):.4f}), "
                f"more than gate.max_logprob_gap = {limit}: the weights, the temperature or the precision of the two differ"
            )
        gaps[f"gate/logprob_gap_{role}"] = gap
    return gaps


def check(
    world: World, players: Players, recipe: Recipe, policies: Mapping[str, Scorer], plan: GatePlan
) -> dict[str, float]:
    """Both checks, of every policy given. Collective; raises GateFailure on rank 0 and that or DriverError on the others."""
    if not plan.settings.enabled:
        return {}
    chosen = world.broadcast(list(plan.prompts[: plan.settings.num_prompts]))
    if not chosen:
        raise GateFailure("no prompts for the gate: give some, or set gate.enabled=false")
    scores = world.from_driver(check_reward, players.grade, chosen, plan.wrong_answer, plan.answer_format)
    texts = [recipe.generator_prompt(p.payload) for p in chosen]
    return scores | check_logprobs(world, players, policies, texts=texts, limit=plan.settings.max_logprob_gap)


def probe(players: Players, role: str, texts: Sequence[str], sampling: Sampling) -> list[Trajectory]:
    """Completions of `texts` by the role's engine, with advantages of 0. On the driver."""
    limit = players.max_prompt_tokens[role]
    prompts = [
        Prompt(id=str(i), tokens=tokenize(players.tokenizers[role], text)[:limit]) for i, text in enumerate(texts)
    ]
    return [replace(t, advantages=[0.0] * len(t.tokens)) for t in sample(players.engines[role], prompts, sampling)]


def both_logprobs(policy: Scorer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The engine's and the trainer's log-probs of the sampled tokens, [number of True in `batch.mask`] each. Collective."""
    return batch.engine_logprobs[batch.mask], policy.logprobs(batch)[batch.mask]


def _short_probe(players: Players, role: str, texts: Sequence[str]) -> list[Trajectory]:
    """One short completion per text, drawn by `role` from its whole distribution (a truncated one has other log-probs)."""
    own = players.samplings[role]
    sampling = replace(
        own, max_tokens=min(own.max_tokens, PROBE_TOKENS), temperature=own.temperature or 1.0, top_p=1.0, top_k=0, min_p=0.0,
        n=1, seed=players.seed_for("gate", role),
    )  # fmt: skip
    return probe(players, role, texts, sampling)
