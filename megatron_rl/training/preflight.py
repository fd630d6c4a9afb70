"""Checks before training: the reward must distinguish correct from wrong answers, and the log-probs of every engine
must match those of its trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.config.schema import SOURCES, Preflight, Reward
from megatron_rl.engines.protocol import Sampling
from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.text import fill
from megatron_rl.training.fleet import Fleet
from megatron_rl.training.iteration import Grade, Recipe, RolloutContext
from megatron_rl.training.prompts import no_answer
from megatron_rl.training.rollouts import sample
from megatron_rl.types import SOURCE, Outcome, Prompt, Rollout

PROBE_TOKENS = 64  # maximum number of tokens sampled per prompt for the comparison of log-probs
# The mean score of known correct answers must be at least CORRECT_SHARE, and the mean score of known wrong answers at
# most WRONG_SHARE. Both are positions in the setting reward.range: 0 is its lower end, 1 is its upper end.
CORRECT_SHARE, WRONG_SHARE = 0.75, 0.25
_log = logging.getLogger(__name__)


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
    error or returns no score, and if a problem has no gold answer. Gradings that time out or are cut off have no score.
    They are left out with a warning, unless no grading has a score.
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
        scores = check_reward(grade, own, reward.wrong_answer, reward.answer_format, bounds=reward.bounds, place=place)
        found |= {f"{name}/{source}" if source else name: score for name, score in scores.items()}
    return found


def _mean_score(
    name: str, responses: Sequence[str], payloads: Sequence[Mapping[str, Any]], graded: Sequence[Graded]
) -> float:
    """Returns the mean of the gradings that have a score, and warns about gradings that a limit cut off. Raises
    PreflightFailure if a grading raised an error or returned no score, or if all gradings were cut off.
    """
    scores = [g.score for g in graded if g.outcome is Outcome.SCORE and not g.cut_off]
    for place, one in enumerate(graded):
        if (one.outcome is Outcome.ERROR and not one.by_response) or not scores:
            raise PreflightFailure(
                f"the reward gives no score to the known {name} answer {responses[place]!r} for the gold answer "
                f"{payloads[place]['answer']!r}: {one.detail}. Mend the function of reward.target, or switch this "
                "check off by preflight.reward=false"
            )
    if cut_off := [g for g in graded if g.cut_off]:
        _log.warning(
            "preflight: %d of %d gradings of known %s answers were cut off (%s): the service of the reward hangs, or "
            "reward.timeout_s is too short", len(cut_off), len(graded), name, cut_off[0].detail,
        )  # fmt: skip
    return fmean(scores)


def check_logprobs(fleet: Fleet, context: RolloutContext, *, texts: Sequence[str], limit: float) -> dict[str, float]:
    """Compares the log-probs of each policy with those of its engine, on tokens sampled after `texts`. Returns the mean
    |engine log-prob - trainer log-prob| of each policy that has an engine (a replay has no engines).

    Called on the driver. The engines must already hold the policies' weights. Raises PreflightFailure for the first
    role whose mean difference is above `limit`.
    """
    gaps = {}
    for role in fleet.with_engine:
        fleet.generate()
        rollouts = _short_probe(context, role, texts)
        scores = fleet.score(role, rollouts, ["logprobs"])
        pair = engine_and_trainer(rollouts, [values["logprobs"] for values in scores])
        gaps[f"preflight/logprob_gap_{role}"] = _judge_gap(role, pair, limit)
    return gaps


def engine_and_trainer(rollouts: Sequence[Rollout], trainer: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the engine's and the trainer's log-probs of the sampled tokens of all rollouts: two arrays
    [number of sampled tokens] float32. `trainer`: the trainer's log-probs [T] of each rollout.
    """
    engine = np.concatenate([r.logprobs[r.trainable] for r in rollouts])
    return engine, np.concatenate([values[r.trainable] for r, values in zip(rollouts, trainer, strict=True)])


def check(fleet: Fleet, context: RolloutContext, recipe: Recipe, plan: PreflightPlan) -> dict[str, float]:
    """Runs the checks before training: tests the reward function, if configured, and the log-probs of every policy.
    Called on the driver. Raises PreflightFailure if a check fails.
    """
    chosen = plan.chosen
    if not chosen:
        raise PreflightFailure("no prompts for the preflight: give some, or set preflight.enabled=false")
    scores = check_rewards(context.grade, plan) if plan.settings.reward else {}
    texts = [recipe.prompt(p.payload) for own in chosen.values() for p in own]
    return scores | check_logprobs(fleet, context, texts=texts, limit=plan.settings.gap_limit)


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
