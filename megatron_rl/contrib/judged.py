"""Has a model write answers to questions, and another one mark questions and answers, for recipes without a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_rl.chat_template import tokenize
from megatron_rl.control_tokens import fill_quoting, spelled
from megatron_rl.engines.protocol import Sampling
from megatron_rl.evaluation.judging import Judging, Question, judge_all
from megatron_rl.rewards.role_tags import judged_score
from megatron_rl.text import decode
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import Draws
from megatron_rl.types import Prompt, Rollout

Ask = Callable[..., Prompt | None]  # what a prompt is about -> the prompt; None where it is too long


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedAnswer:
    """One answer to a question, with what the judge wrote about it."""

    question: int  # its key
    rollout: Rollout
    text: str
    judgements: list[Rollout]  # those without a score too: the judge learns its form from them
    scores: list[float]  # in [0, 1], of the judgements that have one


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A role's place at the context for one purpose: how it is asked, and how its completions are drawn."""

    role: str
    sampling: Sampling
    ask: Ask


def put(context: RolloutContext, role: str, text: str, **payload: str) -> Prompt | None:
    """Makes a text a prompt of a role, which is never cut; None where it is too long."""
    tokens = tokenize(context.tokenizers[role], text)
    return Prompt(id=role, tokens=tokens, payload=payload) if len(tokens) <= context.max_prompt_tokens[role] else None


def put_filled(context: RolloutContext, role: str, template: str, *, question: str, **values: str) -> Prompt | None:
    """Makes a template a prompt of a role, as `put` does, filled with texts that models wrote."""
    text = fill_quoting(context.tokenizers[role], template, question=question, **values)
    return put(context, role, text, question=question)


def quoted(context: RolloutContext, role: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a problem whose question a model wrote, without control tokens of a role's tokenizer in it."""
    return {**payload, "question": spelled(context.tokenizers[role], str(payload["question"]))}


def marks(context: RolloutContext, judge: Speaker, items: Mapping[int, str]) -> dict[int, float]:
    """Has texts marked. -> {key: mean of its marks in [0, 1]}; a text without a readable mark is left out."""
    judged = judge_all(_judging(context, judge), {key: judge.ask(text) for key, text in items.items()})
    scores = {key: [one.opinion for one in own if one.opinion is not None] for key, own in judged.items()}
    return {key: fmean(own) for key, own in scores.items() if own}


def judged_answers(
    context: RolloutContext, solver: Speaker, judge: Speaker, questions: Mapping[int, str]
) -> list[JudgedAnswer]:
    """Has questions answered, and each answer judged as soon as it is written. -> the answers in the order of the
    questions; none to a question that is too long."""
    draws, judging, n = Draws(context, solver.role, solver.sampling), _judging(context, judge), solver.sampling.n
    for key, question in questions.items():
        prompt = solver.ask(question)
        if prompt is not None:
            draws.ask(key, prompt)
    written: dict[int, tuple[Rollout, str]] = {}
    for key, rollouts in draws.answers():
        for j, rollout in enumerate(rollouts):
            text = decode(context.tokenizers[solver.role], rollout.response).text
            written[key * n + j] = rollout, text
            judging.ask(key * n + j, judge.ask(questions[key], text))
    judged = dict(judging.answers())
    return [
        JudgedAnswer(
            question=place // n,
            rollout=rollout,
            text=text,
            judgements=[one.rollout(judge.role) for one in judged.get(place, [])],
            scores=[one.opinion for one in judged.get(place, []) if one.opinion is not None],
        )
        for place, (rollout, text) in sorted(written.items(), key=lambda item: item[0])
    ]


def _judging(context: RolloutContext, judge: Speaker) -> Judging[Prompt | None, float | None]:
    question: Question[Prompt | None, float | None] = Question(
        prompt=lambda prompt: prompt, read=lambda _, text: judged_score(text)
    )
    return Judging(context.engines[judge.role], context.tokenizers[judge.role], judge.sampling, question)
