"""Checks the data sets on this machine for `megatron-rl check`, and describes them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.config.data_settings import generated_name
from megatron_rl.config.schema import HELD_OUT, Model, PromptSet, RoleConfig, SftData
from megatron_rl.data.columns import unread_text
from megatron_rl.data.conversations import ANSWER, MESSAGES, QUESTION
from megatron_rl.data.problems import Problem, asked, columns_of, fields_of, read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import (
    Conversation,
    Preference,
    SftSample,
    columns_read,
    read_samples,
    rows_of_loss,
    sft_rollouts,
    unread_columns,
)
from megatron_rl.spec.run_spec import EvalSpec, GenerateSpec, RunSpec, SftSpec, Spec
from megatron_rl.texts.chat_template import ASSISTANT, ChatTokenizer, problem_text, tokenize, tokenizer_of
from megatron_rl.texts.vocabulary import vocabulary_of
from megatron_rl.training import prompts

ROWS = 1000  # maximum number of problems that `check` reads from a data set without --deep


def data_lines(spec: Spec, *, deep: bool) -> list[str]:
    """Returns one line for each data set on this machine. The line names the columns of prompts and answers, and states
    how the prompts are rendered.

    `deep`: reads all rows instead of the first ROWS, and applies the chat templates if the tokenizer is on this
    machine. Raises ConfigError for data that the command of the config, such as `train`, would reject.
    """
    if not deep:
        with contextlib.suppress(DataError):
            return _lines(spec, deep, ROWS)
    # After a DataError, reads all rows, because the share of malformed rows may be too high only in the first ROWS rows
    with refusing(str, DataError):
        return _lines(spec, deep, None)


def _lines(spec: Spec, deep: bool, rows: int | None) -> list[str]:
    if isinstance(spec, RunSpec):
        return _train_lines(spec, deep, rows)
    if isinstance(spec, SftSpec):
        return _sft_lines(spec, deep)
    if isinstance(spec, EvalSpec):
        sources = {f"sets.{entry.name}": entry.source for entry in spec.evaluated if entry.benchmark is None}
        return [line for name, source in sources.items() for line in _asked_lines(spec, name, source, deep, rows)]
    return _asked_lines(spec, "data", spec.config.data, deep, rows) if isinstance(spec, GenerateSpec) else []


def _train_lines(spec: RunSpec, deep: bool, rows: int | None) -> list[str]:
    recipe = spec.recipe
    role = next(iter(recipe.roles()))
    local_models = {name: settings.model for name, settings in spec.roles.items() if deep and _is_here(settings.model)}
    plain = {name: tokenizer_of(model) for name, model in local_models.items()}
    prompts.check_juniors(spec.roles, plain)
    tokenizers = prompts.asked_tokenizers(spec.roles, plain)
    vocabulary = vocabulary_of(local_models[role], plain[role]) if role in local_models else None
    sets = {name: _first(source, rows) for name, source in spec.sets.items() if _has_rows(source)}
    problems = prompts.read_sets(sets, recipe, tokenizers.get(role), held_out=spec.data.held_out, vocabulary=vocabulary)
    if role in tokenizers:
        limits = spec.prompt_limits(role)
        prompts.readers_of(recipe, tokenizers[role], sets, problems, limits=limits, seed=spec.run.seed)
    if spec.loop.preflight.enabled and spec.loop.preflight.reward:
        held = spec.preflight_set and {f"{HELD_OUT}: {spec.preflight_set}": f"{HELD_OUT}.{spec.preflight_set}"}
        for place, name in (held or {name: name for name in spec.data.of(role)}).items():
            if problems.get(name) and ANSWER not in (values := problems[name][0].values):
                raise ConfigError(prompts.no_answer(place, values))
    evaluated = {entry.name: problems.get(f"{HELD_OUT}.{entry.name}", []) for entry in spec.data.held_out}
    lines = prompts.overlaps(
        (asked(problem.values) for name in spec.data.training for problem in problems.get(name, ())),
        {name: [problem.values for problem in members] for name, members in evaluated.items() if members},
        spec.loop.evaluation,
    )
    model, chat = spec.roles[role].model, spec.roles[role].chat
    tried = role in tokenizers
    named = {f"{HELD_OUT}.{entry.name}": entry.title for entry in spec.data.held_out if entry.benchmark is not None}
    return lines + [
        f"{name}: {len(set_problems)} problems of {named[name]}"
        if name in named
        else f"{name}: {_prompts(sets[name], set_problems, model, chat=chat, tried=tried)}"
        for name, set_problems in problems.items()
    ]


def _asked_lines(
    spec: EvalSpec | GenerateSpec, name: str, source: PromptSet, deep: bool, rows: int | None
) -> list[str]:  # fmt: skip
    if not _has_rows(source):
        return []
    config = spec.config
    source, tried = _first(source, rows), deep and _is_here(config.model)
    problems = read_problems(source)
    if tried:
        tokenizer = tokenizer_of(config.model)
        prompt_tokenizer = ChatTokenizer(tokenizer) if config.chat else tokenizer

        def encode(values: Mapping[str, Any]) -> list[int]:
            return tokenize(prompt_tokenizer, problem_text("{question}", values))

        prompts.try_prompts(name, problems, encode, vocabulary_of(config.model, tokenizer))
        if isinstance(spec, GenerateSpec):
            from megatron_rl.commands.generate import asked_of  # imports torch

            asked_of(spec, tokenizer, problems)
    return [f"{name}: {_prompts(source, problems, config.model, chat=config.chat, tried=tried)}"]


def _sft_lines(spec: SftSpec, deep: bool) -> list[str]:
    data, role, lines = spec.data, spec.roles["model"], []
    kind = rows_of_loss(loss_of(role).needs)
    for name, path in (("train", data.train), ("validation", data.validation)):
        if path is None or not Path(path).exists():
            continue
        source = dataclasses.replace(data, train=path)
        samples = read_samples(source, split=name, kind=kind)
        firsts = [sample.chosen if isinstance(sample, Preference) else sample for sample in samples]
        chats = sum(isinstance(sample, Conversation) for sample in firsts)
        held = {
            **{"completion": "", "labelled": ", with labels", "rewarded": ", with rewards"},
            **{"scored": ", with labels or rewards", "steps": ", in labelled steps"},
        }
        kinds = {len(samples): "conversations", 0: "prompts with a solution" if kind == "steps" else "pairs of texts"}
        loss_on = ", with the loss on the assistant's turns" if chats and role.head is None else ""
        line = f"data.{name}: {len(samples)} samples: {kinds.get(chats, 'texts and conversations')}{loss_on}"
        line += held.get(kind, ", each with a chosen and a rejected response")
        line += unread_text(unread_columns(source, kind, name, ROWS), columns_read(source, kind))
        if deep and _is_here(role.model):
            line += f"; {_trained_share(data, role, samples)}"
        lines.append(line)
    return lines


def _trained_share(data: SftData, role: RoleConfig, samples: Sequence[SftSample]) -> str:
    """Tokenizes samples. Returns a line with the number of trained tokens or, for a reward model, of trained scores.

    Raises ConfigError or DataError if `megatron-rl sft` would reject the samples."""
    tokenizer = tokenizer_of(role.model)
    vocabulary = vocabulary_of(role.model, tokenizer)
    rollouts = sft_rollouts(
        samples, tokenizer, append_eos=data.append_eos, max_tokens=data.max_tokens, max_bad_share=data.max_bad_share,
        vocabulary=vocabulary,
    )  # fmt: skip
    tokens, trained = sum(len(r.tokens) for r in rollouts), sum(r.num_trainable for r in rollouts)
    if role.head is not None:
        return f"{len(rollouts)} texts are usable, with {tokens} tokens and {trained} scores"
    line = f"{len(rollouts)} are usable, and {trained} of {tokens} tokens are trained on"
    if not data.append_eos or any(
        np.isin(rollout.tokens[rollout.trainable], [*vocabulary.ends]).any() for rollout in rollouts
    ):
        return line
    return f"{line}; none of them ends a text: name the text that ends a turn in sampling.stop_strings, or as eos_token"


def _prompts(source: PromptSet, problems: Sequence[Problem], model: Model, *, chat: bool, tried: bool) -> str:
    """Returns a description of a prompt set's prompts and answers. Raises DataError if the set has no usable
    problem."""
    if not problems:
        raise DataError(f"{source.path} has no usable problem: look at data.path and data.filters")
    fields = fields_of(source)
    template = "the tokenizer's chat template" if model.chat_template is None else f"the file {model.chat_template}"
    why = "give --deep" if _is_here(model) else f"{model.path} is not here"
    rendered = f"rendered with {template}" + ("" if tried else f" (not tried: {why})")
    as_chat, has_messages = MESSAGES in problems[0].values, MESSAGES in fields
    if has_messages:
        what = f"messages, {rendered}" if as_chat else "the last user's message of each, in the text template"
    else:
        what = "text, as the user's message, " + rendered if as_chat else "text, in the text template"
    if not as_chat and chat:
        what += f" as a user's message, {rendered}"
    count = f"the first {ROWS}" if source.limit == ROWS == len(problems) else len(problems)
    description = f"{count} problems; prompts: column `{fields[MESSAGES if has_messages else QUESTION]}`, {what}"
    open_ended = sum(p.values[MESSAGES][-1]["role"] == ASSISTANT for p in problems) if as_chat else 0
    goes_on = f"; {open_ended} end with an assistant's turn, which the model goes on with" if open_ended else ""
    answer = f"column `{fields['answer']}`" if "answer" in fields else "none, so that the reward must do without"
    passed, unread = columns_of(source, ROWS)
    more = f"; for templates, rewards and environments: {', '.join(f'`{key}`' for key in sorted(passed))}"
    known_columns = {*fields.values(), QUESTION, MESSAGES, ANSWER, "prompt", "system"}
    return f"{description}{goes_on}; answers: {answer}{more if passed else ''}{unread_text(unread, known_columns)}"


def _has_rows(source: PromptSet) -> bool:
    """Returns whether the problems of a prompt set can be read on this machine."""
    return generated_name(source.path) is not None or Path(source.path).exists()


def _first(source: PromptSet, rows: int | None) -> PromptSet:
    """Returns the prompt set limited to its first `rows` problems, because large sets are slow to read.

    If `rows` is None, only the limit in the set's settings applies."""
    limits = [limit for limit in (source.limit, rows) if limit is not None]
    return dataclasses.replace(source, limit=min(limits, default=None))


def all_here(spec: Spec) -> bool:
    """Returns whether the models' tokenizers and all problem sets of a run are on this machine."""
    sets = all(_has_rows(source) for source in spec.sets.values())
    return sets and all(_is_here(role.model) for role in spec.roles.values())


def _is_here(model: Model) -> bool:
    return Path(model.tokenizer or model.path).is_dir()
