"""Tries the tokenizers, the prompts, the reward and the environment of a run, for `megatron-rl check --deep`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.config.base import refusing
from megatron_rl.config.data_sources import SOURCES, Source
from megatron_rl.config.evaluation import Evaluation, Reward
from megatron_rl.config.model import RoleConfig
from megatron_rl.data.mixed_sources import MixedReader
from megatron_rl.data.problems import PromptReader
from megatron_rl.data.rows import DataError
from megatron_rl.engines.batched_session import BatchedSession, Row
from megatron_rl.engines.full_prompts import FullPrompts
from megatron_rl.engines.protocol import Completion, EngineError, SampleLog, Session, Tokens
from megatron_rl.recipes.episode_rollouts import OUTCOME, OverEpisodes
from megatron_rl.rewards.grading_pool import Graded, RewardFailure
from megatron_rl.rewards.source_grading import GradePools
from megatron_rl.run.metrics import Stopwatch
from megatron_rl.session import builders
from megatron_rl.session.evaluations import held_out_sets
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.texts.chat_template import ChatTokenizer, UserText, answered_ids, tokenizer_of
from megatron_rl.texts.text import fill
from megatron_rl.texts.vocabulary import vocabulary_of
from megatron_rl.training.held_out_sets import COUNTS, HeldOutSet, evaluate_sets, value_of
from megatron_rl.training.iteration import EvaluationDraws, Grade, Recipe, RolloutContext
from megatron_rl.training.preflight import PreflightFailure, check_rewards
from megatron_rl.types import SOURCE, Outcome, Prompt, Stop

SHOWN = 600  # maximum number of characters that are shown of a text, such as a prompt
TRIED = 8  # number of problems whose episodes are tried if no model was asked in the episode of the first problem
MOST_ANSWERS = 1000  # maximum number of answers in the episode that is played as a test


def trial_lines(spec: RunSpec, *, starts_here: bool) -> list[str]:
    """Tries the tokenizers, prompts, reward and environment of a run. Returns lines that describe the results. The
    run's models and data must be on this machine.

    `starts_here`: whether the run will start on this machine, so that the reward and the environment can be tried.
    Raises ConfigError for everything that `train` would reject before the first update.
    """
    tokenizers = {name: tokenizer_of(role.model) for name, role in spec.roles.items()}
    recipe, sources = spec.recipe, spec.data.sources
    role = next(iter(recipe.roles()))
    with refusing(str, DataError):
        readers, held_out, _ = builders.prompts(
            recipe, spec.data, spec.roles, tokenizers, spec.prompt_limits(role), seed=spec.run.seed
        )
        firsts = readers[role].first(1)  # the first prompt of each source
    lines = [_tokenizer_line(spec.roles[name], name, tokenizers[name], recipe, firsts[0]) for name in spec.roles]
    lines += _prompt_lines(role, spec.roles[role].max_prompt_tokens, readers[role])
    plays = isinstance(recipe, OverEpisodes)
    if not plays:
        lines += [f"the first prompt{_of(prompt)}: {_shown(tokenizers[role], prompt.tokens)}" for prompt in firsts]
    if starts_here:
        with contextlib.ExitStack() as stack, refusing(str, PreflightFailure, RewardFailure):
            grade = builders.grade_with(sources, spec.reward, GradePools(stack))
            plan = builders.preflight_plan(
                spec.loop.preflight, spec.preflight_set, spec.reward, sources, readers[role], held_out
            )
            if plan is not None and plan.settings.reward:
                check_rewards(grade, plan)
            if not plays or OUTCOME in recipe.rewards:
                lines += [_reward_line(sources, spec.reward, prompt, grade) for prompt in firsts]
            ends = {n: min(vocabulary_of(role.model, tokenizers[n]).ends, default=0) for n, role in spec.roles.items()}
            engines: dict[str, Any] = {name: EmptyAnswers(end) for name, end in ends.items()}
            context = builders.context(
                spec.roles, spec.reward, spec.loop.rollouts, engines, tokenizers, grade, Stopwatch(), seed=spec.run.seed
            )
            lines += _episode_lines(recipe, context, readers[role]) if plays else []
            evaluation, firsts_of = spec.loop.evaluation, {name: prompts[:1] for name, prompts in held_out.items()}
            sets = held_out_sets(spec.data.held_out, firsts_of, spec.reward, stack, greedy=evaluation.greedy)
            _check_metrics(evaluation, recipe, context, sets)
    return lines


def _tokenizer_line(role: RoleConfig, name: str, tokenizer: Any, recipe: Any, first: Prompt) -> str:
    """Returns a line about a role's tokenizer: its number of tokens, the number of rows of the model's embedding, and
    the special tokens. The line has a warning if the chat template ends an assistant's turn with a token at which
    engines do not stop."""
    vocabulary = vocabulary_of(role.model, tokenizer)
    token = lambda i: f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})"  # noqa: E731
    named = lambda ids: ", ".join(map(token, sorted(ids))) or "none"  # noqa: E731
    line = (
        f"{name}: {len(tokenizer)} tokens in the tokenizer, {vocabulary.rows} rows in the model's embedding; answers "
        f"end at {named(vocabulary.ends)}; pad {named({tokenizer.pad_token_id} - {None})}; "
        f"{'a' if tokenizer.chat_template else 'no'} chat template"
    )
    text = recipe.prompt(first.payload)
    if tokenizer.chat_template and role.head is None and (role.chat or isinstance(text, UserText)):
        end = answered_ids(ChatTokenizer(tokenizer), text, "a")[-4:]
        stops = {*vocabulary.ends, *(tokenizer.convert_tokens_to_ids(s) for s in role.sampling.stop_strings)}
        written = [i for i in end if i in vocabulary.special or i in vocabulary.ends]
        if written and not stops & {*written}:
            line += (
                f". WARNING: the template ends a turn with {named(written)}, at which no answer ends: name it in roles."
                f"{name}.sampling.stop_strings"
            )
    return line


def _prompt_lines(role: str, limit: int, reader: PromptReader | MixedReader) -> list[str]:
    """Returns lines about repeated problems and the longest prompt. `limit`: max_prompt_tokens of the role."""
    questions, lines = reader.questions, list[str]()
    if twice := len(questions) - len({*questions}):
        lines.append(f"data: {twice} of {len(questions)} problems repeat the question of another problem")
    return [*lines, f"data: the longest prompt has {reader.longest} tokens; roles.{role}.max_prompt_tokens = {limit}"]


def _reward_line(sources: Mapping[str, Source], run_reward: Reward, prompt: Prompt, grade: Grade) -> str:
    """Returns a line with the rewards of an empty answer and, if the data has one, of a prompt's correct answer."""
    texts = {"an empty answer": ""}
    if "answer" in prompt.payload:
        source = sources.get(prompt.payload.get(SOURCE, ""))
        reward = run_reward if source is None or source.reward is None else source.reward
        right = fill(reward.answer_format, answer=str(prompt.payload["answer"]))
        texts = {f"the first prompt's known answer, as {right[:SHOWN]!r}": right} | texts
    graded = grade([*texts.values()], [prompt.payload] * len(texts))
    scores = [f"{_score(grading)} for {name}" for name, grading in zip(texts, graded, strict=True)]
    line = f"reward{_of(prompt)}: {'; '.join(scores)}"
    if not all(map(_has_score, graded)):
        line += ". WARNING: a sample without a score is replaced, and teaches nothing"
    elif graded[-1].correct or len(graded) == 2 and graded[0].score <= graded[1].score:
        line += ". WARNING: an empty answer should earn less than a right one"
    return line


def _of(prompt: Prompt) -> str:
    return f" of {SOURCES}.{prompt.payload[SOURCE]}" if SOURCE in prompt.payload else ""


def _score(graded: Graded) -> str:
    return f"{graded.score:g}" if _has_score(graded) else f"no score ({graded.detail})"


def _has_score(graded: Graded) -> bool:
    """Returns whether the reward function returned a score. `reward.cut_off` may score a grading that was cut off."""
    return graded.outcome is Outcome.SCORE and not graded.cut_off


def _episode_lines(recipe: Any, context: RolloutContext, reader: PromptReader | MixedReader) -> list[str]:
    """Plays one episode in which all answers are empty. Returns lines with the first prompt and the rewards.

    Raises RewardFailure if the episodes of the first TRIED problems fail before any model is asked, for example because
    no prompt fits into max_prompt_tokens.
    """
    engines: Mapping[str, Any] = context.engines
    context = replace(context, evaluation=EvaluationDraws(greedy=False))
    try:
        metrics = recipe.evaluate(reader.first(1)[:1], context)
        outcome = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
    except (RewardFailure, EngineError) as error:
        outcome = f"WARNING: it fails: {error}"
        if not any(engine.prompts for engine in engines.values()):
            recipe.evaluate(reader.first(TRIED), context)
    first = next((tokens for engine in engines.values() for tokens in engine.prompts[:1]), ())
    name = next((name for name, engine in engines.items() if engine.prompts), next(iter(context.samplings)))
    return [
        f"the first prompt of an episode, to {name}: {_shown(context.tokenizers[name], first)}",
        f"an episode in which every answer is empty: {outcome}",
    ]


def _check_metrics(evaluation: Evaluation, recipe: Recipe, context: RolloutContext, sets: Sequence[HeldOutSet]) -> None:
    """Raises ConfigError if evaluation.best or evaluation.early_stop names a metric that evaluations do not report.

    To find the known names, runs an evaluation in which every answer is empty. Counts and F1 scores are always
    accepted, because an evaluation of empty answers may lack them. If the evaluation fails, nothing is checked.
    """
    followed = [rule for rule in (evaluation.best, evaluation.early_stop) if rule is not None]
    if followed and sets:
        with contextlib.suppress(RewardFailure, EngineError):
            metrics, _ = evaluate_sets(recipe, sets, context)
            for rule in followed if metrics else ():
                last = rule.metric.rpartition("/")[2].removesuffix("_greedy")
                value_of(metrics, rule, known=last in COUNTS or last.endswith("_f1"))


def _shown(tokenizer: Any, tokens: Tokens) -> str:
    """Returns the number of tokens of a prompt and the prompt's text with special tokens, shortened in the middle."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False)
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return f"{len(tokens)} tokens, {shown!r}"


class EmptyAnswers:
    """A fake engine that answers every request with only the end-of-text token `end`, with log-prob 0."""

    version = 0

    def __init__(self, end: int) -> None:
        self.prompts: list[np.ndarray] = []  # prompts of all requests so far
        self._end = end

    def session(self, priority: int = 0, log: SampleLog | None = None) -> Session:
        return BatchedSession(self._run, lambda prompt, sampling, key: None, FullPrompts("check"), log)

    def _run(self, rows: Sequence[Row]) -> list[Completion]:
        self.prompts += [row.tokens for row in rows]
        if len(self.prompts) > MOST_ANSWERS:
            raise EngineError(f"the episode does not end after {MOST_ANSWERS} empty answers")
        return [
            Completion(
                tokens=np.array([self._end]), logprobs=np.zeros(1), stop=Stop.EOS,
                authors=None if row.sampling.tandem is None else np.ones(1),
            )
            for row in rows
        ]  # fmt: skip

    def tend(self) -> None: ...
