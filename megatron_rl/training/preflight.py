"""Checks before training: the reward must distinguish correct from wrong answers, and the log-probs of every engine
must match those of its trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.chat_template import tokenize
from megatron_rl.config.schema import SOURCES, Preflight, Reward
from megatron_rl.engines.protocol import Sampling
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.text import fill
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.iteration import Grade, Recipe, RolloutContext
from megatron_rl.training.prompts import no_answer
from megatron_rl.training.rollouts import sample
from megatron_rl.training.update import Policy, policy_logprobs
from megatron_rl.types import SOURCE, Outcome, Prompt, Rollout
from megatron_rl.world import World

PROBE_TOKENS = 64  # maximum number of tokens sampled per prompt for the comparison of log-probs
# The mean score of known correct answers must be at least CORRECT_SHARE, and the mean score of known wrong answers at
# most WRONG_SHARE. Both are positions in the setting reward.range: 0 is its lower end, 1 is its upper end.
CORRECT_SHARE, WRONG_SHARE = 0.75, 0.25


class PreflightFailure(RuntimeError):
    """Raised if a preflight check fails, because training would learn from wrong rewards or log-probs. The message
    gives the compared values.
    """


@dataclass(frozen=True, kw_only=True)
class PreflightPlan:
    """The settings and prompts of the preflight checks. `prompts` is used on the driver only."""

    settings: Preflight
    prompts: Sequence[Prompt]  # the first settings.num_prompts prompts of each source are used
    # name of the setting that defines the prompts, such as "evaluation.sets: gsm8k"; for prompts of one of several data
    # sources, the name of the source is used instead
    place: str = "data"
    reward: Reward = field(default_factory=Reward)
    # {name of a source in data.sources: reward settings}; sources that are not in the mapping use the field `reward`
    rewards: Mapping[str, Reward] = field(default_factory=dict)

    @property
    def chosen(self) -> dict[str, list[Prompt]]:
        """Returns the prompts that the checks use: {source: prompts}; the source is "" if there is one data set."""
        found: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            own = found.setdefault(prompt.payload.get(SOURCE, ""), [])
            own += [prompt] if len(own) < self.settings.num_prompts else []
        return found


def check_reward(
    grade: Grade, prompts: Sequence[Prompt], wrong_answer: str, answer_format: str,
    *, bounds: tuple[float, float] = (0.0, 1.0), place: str = "data",
) -> dict[str, float]:  # fmt: skip
    """Checks that the reward function separates correct from wrong answers. Grades responses with each problem's gold
    answer, and responses with `wrong_answer`, both inserted into `answer_format`.

    `bounds`: lowest and highest score (reward.range). `place`: name of the setting that defines the prompts, for
        error messages. Called on the driver. Returns the mean score of the correct and of the wrong answers as metrics.

    Raises PreflightFailure if the mean score of correct answers is below CORRECT_SHARE of the range, or the mean score
    of wrong answers is above WRONG_SHARE of the range. Also raises PreflightFailure if the reward function raises an
    error or returns no score, and if a problem has no gold answer. Gradings that time out are ignored, unless all of
    them time out.
    """
    payloads = [p.payload for p in prompts]
    low, high = bounds
    least, most = (low + share * (high - low) for share in (CORRECT_SHARE, WRONG_SHARE))
    if without := [p for p in payloads if "answer" not in p]:
        raise PreflightFailure(no_answer(place, without[0]))
    scores = {}
    for name, answers in (("correct", [str(p["answer"]) for p in payloads]), ("wrong", [wrong_answer] * len(payloads))):
        responses = [fill(answer_format, answer=a) for a in answers]
        scores[name] = _mean_score(name, responses, payloads, grade(responses, payloads))
        if name == "correct" and scores[name] < least or name == "wrong" and scores[name] > most:
            raise PreflightFailure(
                f"{place}: the reward gives {scores[name]:.2f} on average to {len(answers)} known {name} answers, e.g. "
                f"to the response {responses[0]!r} for the gold answer {payloads[0]['answer']!r} (correct ones need at "
                f"least {least:g}, wrong ones at most {most:g}). Check the set's fields and answer_pattern, "
                "reward.target, and whether reward.answer_format is how a response states its answer. To skip this "
                "check, set preflight.reward=false"
            )
    return {"preflight/reward_correct": scores["correct"], "preflight/reward_wrong": scores["wrong"]}


def check_rewards(grade: Grade, plan: PreflightPlan) -> dict[str, float]:
    """Checks the reward function of each source with `check_reward`, and returns the metrics. The name of a metric of a
    source ends in the name of the source. Called on the driver."""
    found: dict[str, float] = {}
    for source, own in plan.chosen.items():
        reward = plan.rewards.get(source, plan.reward)
        place = f"{SOURCES}.{source}" if source else plan.place
        scores = check_reward(grade, own, reward.wrong_answer, reward.answer_format, bounds=reward.range, place=place)
        found |= {f"{name}/{source}" if source else name: score for name, score in scores.items()}
    return found


def _mean_score(
    name: str, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]], graded: Sequence[Graded]
) -> float:
    """Returns the mean of the gradings that have a score. Raises PreflightFailure if a grading raised an error or
    returned no score, or if all gradings timed out.
    """
    for place, one in enumerate(graded):
        if one.outcome is Outcome.ERROR or all(g.outcome is Outcome.TIMEOUT for g in graded):
            raise PreflightFailure(
                f"the reward gives no score to the known {name} answer {responses[place]!r} for the gold answer "
                f"{payloads[place]['answer']!r}: {one.detail}. Mend the function of reward.target, or switch this "
                "check off by preflight.reward=false"
            )
    return fmean(g.score for g in graded if g.outcome is Outcome.SCORE)


def check_logprobs(
    world: World, context: RolloutContext, memory: DeviceMemory, *, texts: Sequence[str], limit: float
) -> dict[str, float]:
    """Compares the log-probs of each policy with those of its engine, on tokens sampled after `texts`. Returns the mean
    |engine log-prob - trainer log-prob| of each policy that has an engine.

    Called by every rank. The engines must already hold the policies' weights.

    For the first role whose mean difference is above `limit`, raises PreflightFailure on the driver and DriverError on
    the other ranks.
    """
    gaps = {}
    for role, trainee in memory.trainees.items():
        if trainee.refit is not None:  # skips policies without an engine (a replay has no engines)
            pair = engine_and_trainer(world, context, memory, role, texts)
            gaps[f"preflight/logprob_gap_{role}"] = world.from_driver(_judge_gap, role, pair, limit)
    return gaps


def engine_and_trainer(
    world: World, context: RolloutContext, memory: DeviceMemory, role: str, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Samples short continuations of `texts` with the role's engine, and returns the log-probs of the sampled tokens
    from the engine and from the role's policy (the trainer).

    Returns two arrays [N] float32, empty on ranks other than the driver.
    """
    drawn: list[Rollout] = []
    memory.generate()
    world.from_driver(lambda: drawn.extend(_short_probe(context, role, texts)))
    with memory.weights(role):
        return both_logprobs(world, memory.trainees[role].policy, drawn)


def both_logprobs(world: World, policy: Policy, drawn: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the engine's and the trainer's log-probs of the sampled tokens of the rollouts `drawn`. Called by every
    rank; `drawn` is used on the driver only.

    Returns two arrays [number of sampled tokens] float32, empty on the other ranks.
    """
    found = policy_logprobs(world, policy, list(drawn) if world.rank == 0 else None)
    if found is None:
        return np.empty(0, np.float32), np.empty(0, np.float32)
    engine = np.concatenate([r.logprobs[r.trainable] for r in drawn])
    return engine, np.concatenate([values[r.trainable] for r, values in zip(drawn, found, strict=True)])


def check(
    world: World, context: RolloutContext, recipe: Recipe, memory: DeviceMemory, plan: PreflightPlan
) -> dict[str, float]:
    """Runs the checks before training: tests the reward function, if configured, and the log-probs of every policy.
    Called by every rank. If a check fails, raises PreflightFailure on rank 0 and DriverError on the other ranks.
    """
    if not plan.settings.enabled:
        return {}
    chosen = plan.chosen  # empty on all ranks but the driver
    if not world.broadcast(len(chosen)):
        raise PreflightFailure("no prompts for the preflight: give some, or set preflight.enabled=false")
    scores = world.from_driver(check_rewards, context.grade, plan) if plan.settings.reward else {}
    texts = [recipe.prompt(p.payload) for own in chosen.values() for p in own]
    return scores | check_logprobs(world, context, memory, texts=texts, limit=plan.settings.gap_limit)


def probe(context: RolloutContext, role: str, texts: Sequence[str], sampling: Sampling) -> list[Rollout]:
    """Samples continuations of `texts` with the role's engine. Returns one rollout per sample, with advantages of 0.
    Called on the driver.
    """
    limit = context.max_prompt_tokens[role]
    tokenizer = context.tokenizers[role]
    prompts = [Prompt(id=str(i), tokens=tokenize(tokenizer, text)[:limit]) for i, text in enumerate(texts)]
    return [replace(r, advantages=0.0) for r in sample(context, role, prompts, sampling)]


def _judge_gap(role: str, pair: tuple[np.ndarray, np.ndarray], limit: float) -> float:
    """Returns the mean absolute difference between the engine's and the trainer's log-probs. Called on the driver.
    `pair`: (the engine's log-probs, the trainer's log-probs) of the same tokens. Raises PreflightFailure if the mean
    difference is above `limit`.
    """
    engine, trainer = pair
    gaps = np.abs(engine - trainer)
    gap = float(gaps.mean()) if len(gaps) else 0.0
    if gap <= limit:
        return gap
    worst = int(gaps.argmax())
    raise PreflightFailure(
        f"{role}: the engine's log-probs differ from the trainer's by {gap:.4f} on average "
        f"(engine {float(engine.mean()):.4f}, trainer {float(trainer.mean()):.4f}; "
        f"worst token: engine {float(engine[worst]):.4f}, trainer {float(trainer[worst]):.4f}), "
        f"more than preflight.max_logprob_gap = {limit}: the weights, the temperature or the precision of the two "
        "differ"
    )


def _short_probe(context: RolloutContext, role: str, texts: Sequence[str]) -> list[Rollout]:
    """Returns one short rollout per text, sampled by `role` from its full distribution. With top-p or top-k sampling,
    the engine would return other log-probs.
    """
    own = context.samplings[role]
    sampling = replace(
        own, max_tokens=min(own.max_tokens, PROBE_TOKENS), temperature=own.temperature or 1.0, top_p=1.0, top_k=0,
        min_p=0.0, n=1, seed=context.seed_for("preflight", role),
    )  # fmt: skip
    return probe(context, role, texts, sampling)
