"""Reads the problems of a run and converts each problem to the prompt tokens for the recipe's first role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.evaluation import Evaluation
from megatron_rl.config.schema import HELD_OUT, SOURCES, ConfigError, Model, PromptSet, RoleConfig, Source
from megatron_rl.data.benchmarks import Benchmark, read_benchmark
from megatron_rl.data.conversations import MESSAGES, QUESTION, as_conversation, shape_of
from megatron_rl.data.problems import Problem, PromptReader, asked, read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.spec.evaluated_sets import EvaluatedSet
from megatron_rl.texts.chat_template import ChatError, ChatTokenizer, UserText, tokenize, tokenizer_of
from megatron_rl.texts.vocabulary import Vocabulary, check_vocabularies
from megatron_rl.training.iteration import Recipe
from megatron_rl.types import SOURCE, TEMPLATE

Encode = Callable[[Mapping[str, Any]], list[int]]  # values of a problem -> tokens of its prompt


def asked_tokenizers(roles: Mapping[str, RoleConfig], tokenizers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer that encodes the prompts of each role. If a role has the setting `chat`, its tokenizer is
    wrapped so that it renders texts with the chat template. Raises ConfigError if a role has the setting `chat` and its
    tokenizer has no chat template.
    """
    out = dict(tokenizers)
    for name, tokenizer in tokenizers.items():
        if roles[name].chat:
            if not tokenizer.chat_template:
                raise ConfigError(
                    f"roles.{name}.chat = true, but the tokenizer has no chat template: name a Jinja file by "
                    f"roles.{name}.model.chat_template, or set chat to false"
                )
            out[name] = ChatTokenizer(tokenizer)
    return out


def check_juniors(roles: Mapping[str, RoleConfig], tokenizers: Mapping[str, Any]) -> None:
    """Raises ConfigError if a tandem's junior model has a different vocabulary than its senior. Checks only models
    whose tokenizers are available on the local disk.
    """
    for name, role in roles.items():
        junior = None if role.tandem is None else role.tandem.junior
        if junior is not None and name in tokenizers and (Path(junior) / "tokenizer.json").is_file():
            why = f"roles.{name}.tandem.junior = {junior}: its model and the senior's write one text"
            check_vocabularies(tokenizers[name], tokenizer_of(Model(path=junior)), why)


def encoder(recipe: Recipe, tokenizer: Any) -> Encode:
    """Returns the function that converts a problem to the prompt tokens of the recipe's first role."""
    return lambda values: tokenize(tokenizer, recipe.prompt(values))


def read_set(source: PromptSet, benchmark: Benchmark | None) -> list[Problem]:
    """Returns all problems of a set. `source`: the settings of the set. `benchmark`: the benchmark whose format the
    rows have; None if the set is not a benchmark. Raises ConfigError if the path contains no data, and DataError if no
    row is usable or the share of bad rows is above max_bad_share.
    """
    return read_problems(source) if benchmark is None else read_benchmark(benchmark, source)


def read_sets(
    sets: Mapping[str, PromptSet], recipe: Recipe, tokenizer: Any | None, *, held_out: Sequence[EvaluatedSet] = (),
    vocabulary: Vocabulary | None = None,
) -> dict[str, list[Problem]]:  # fmt: skip
    """Reads the problem sets of a run. Returns the problems of each set by its name in the settings. If a tokenizer is
    given, encodes one prompt of each form (sequence of message roles) as a test.

    `held_out`: the sets for evaluation, which are in `sets` as `evaluation.sets.NAME`. Questions of a benchmark are
        converted to conversations if the training problems are conversations.
    `vocabulary`: vocabulary of the model, to detect tokens without an embedding row.

    Raises ConfigError if the path of a set contains no data, if the tokenizer has no chat template, if a set holds
    conversations but the recipe builds prompts from plain text, or if a set of `held_out` has another form (texts or
    conversations) than the other sets. Raises DataError if a set has too many bad rows, if the chat template does not
    render a conversation, or if a prompt has a token without an embedding row.
    """
    evaluated = {f"{HELD_OUT}.{own.name}": own for own in held_out}
    training = {name: _of_source(name, own) for name, own in sets.items() if name not in evaluated}
    chats = any(MESSAGES in own[0].values for own in training.values() if own)
    problems = training | {
        name: _with_values(_as_trained(read_set(sets[name], own.benchmark), own, chat=chats), {TEMPLATE: own.template})
        for name, own in evaluated.items()
        if name in sets
    }
    for name, own in problems.items():
        if own:
            _refuse_form(name, own[0], recipe)
        if tokenizer is not None:
            try_prompts(name, own, encoder(recipe, tokenizer), vocabulary)
    forms = ("texts", "conversations")
    for name in [name for name in evaluated if problems.get(name)]:
        own = MESSAGES in problems[name][0].values
        other = next((key for key, found in training.items() if found and (MESSAGES in found[0].values) != own), None)
        if other is not None and sets[name].chat is None:
            raise ConfigError(
                f"{name} holds {forms[own]}, and {other} {forms[not own]}: set `chat` of {name} to "
                f"{str(not own).lower()}, so that a model is measured as it is trained, or to {str(own).lower()}"
            )
    return problems


def _refuse_form(name: str, problem: Problem, recipe: Recipe) -> None:
    """Raises ConfigError if the recipe cannot make prompts of a data set. `name`: name of the data set. `problem`: one
    problem of it. The recipe cannot make prompts if the problem is a conversation and the recipe supports only texts,
    or if the data set has a setting `template` that has no effect: a template is not used for conversations, and some
    recipes do not use it at all.
    """
    chat = MESSAGES in problem.values
    if chat and not isinstance(recipe.prompt(problem.values), UserText):
        first = next(iter(recipe.roles()))
        raise ConfigError(
            f"{name} holds conversations, and this recipe fills a template of its own with the question: set "
            f"{name}.chat to false, and roles.{first}.chat to true where that text shall be a user's message"
        )
    if chat and TEMPLATE in problem.values:
        raise ConfigError(f"{name}.template: its problems are conversations, which have none: set it to null")
    if TEMPLATE in problem.values:
        texts = {recipe.prompt({**problem.values, TEMPLATE: template}) for template in ("plain", "boxed_answer")}
        if len(texts) == 1:
            raise ConfigError(f"{name}.template: this recipe makes its prompts without it: set it to null")


def _of_source(name: str, source: PromptSet) -> list[Problem]:
    """Reads the training problems of the data set `name`. If it is one of several sources, its name and its prompt
    template are added to the values of each problem."""
    added = {SOURCE: name.removeprefix(f"{SOURCES}."), TEMPLATE: source.template} if isinstance(source, Source) else {}
    return _with_values(read_problems(source), added)


def _with_values(problems: list[Problem], added: Mapping[str, str | None]) -> list[Problem]:
    """Adds the values in `added` to the values of each problem, and returns the new problems. A value of None is not
    added.
    """
    given = {name: value for name, value in added.items() if value is not None}
    return [replace(p, values={**p.values, **given}) for p in problems] if given else problems


def _as_trained(problems: list[Problem], own: EvaluatedSet, *, chat: bool) -> list[Problem]:
    """Converts the problems of an evaluation set to conversations if the set is a benchmark and its setting `chat` is
    true, or null while the argument `chat` is True. Otherwise returns the problems unchanged. `own`: the settings of
    the evaluation set. `chat`: whether the training problems are conversations.
    """
    if own.benchmark is None or not (chat if own.source.chat is None else own.source.chat):
        return problems
    system = own.source.system
    return [
        replace(p, values={**p.values, MESSAGES: as_conversation(str(p.values[QUESTION]), system)}) for p in problems
    ]


def readers_of(
    recipe: Recipe, tokenizer: Any, sets: Mapping[str, PromptSet], problems: Mapping[str, Sequence[Problem]], *,
    limits: Mapping[str, int], seed: int,
) -> dict[str, PromptReader]:  # fmt: skip
    """Returns a prompt reader for each problem set, by the name of the set in the settings.

    `limits`: {setting: maximum prompt length}, see RunSpec.prompt_limits. The first maximum applies to the whole run,
        the other ones to stages of the run.

    Raises DataError if the share of prompts in a set that are longer than the run's maximum is above the set's setting
    max_bad_share, or if all prompts are longer than the maximum of a stage.
    """
    encode, run = encoder(recipe, tokenizer), next(iter(limits))
    readers = {
        name: PromptReader(
            problems[name],
            encode,
            seed=seed if not isinstance(source, Source) else f"{seed}/{name}",
            shuffle=source.shuffle,
            max_prompt_tokens=limits[run],
            source=name.removeprefix(f"{SOURCES}.") if isinstance(source, Source) else "",
        )
        for name, source in sets.items()
    }
    for name, reader in readers.items():
        reader.refuse_long(run, sets[name].max_bad_share, f"{name} ({sets[name].path})")
        shortest = min(tokens for _, tokens in reader.lengths)
        for setting in [setting for setting, most in limits.items() if most < shortest]:
            raise DataError(f"{setting} = {limits[setting]}: every prompt of {name} is longer, the shortest {shortest}")
    return readers


def overlaps(
    training: Iterable[str], held_out: Mapping[str, Sequence[Mapping[str, Any]]], evaluation: Evaluation
) -> list[str]:
    """Returns a line for each evaluation set with problems that are also in the training data.

    `training`: the text that identifies a problem (data.problems.asked) of each training problem. `held_out`: {name of
        an evaluation set: the values of its problems}. `evaluation`: the settings of the run's evaluations.

    Raises ConfigError if all problems of a set are training problems, and `best` or `early_stop` follows a metric to
    which the set contributes: the metric then measures what was memorised.
    """
    texts = {name: [asked(values) for values in own] for name, own in held_out.items()}
    searched, lines = {text for own in texts.values() for text in own}, list[str]()
    trained = {text for text in training if text in searched}
    rules = {"best": evaluation.best, "early_stop": evaluation.early_stop}
    for name, own in texts.items():
        known = sum(text in trained for text in own)
        line = f"{known} of {len(own)} problems of {HELD_OUT}.{name} are in data, too"
        for rule, settings in rules.items():
            # in a metric such as generator/math500/accuracy, the second part is the name of a set
            of_set = None if settings is None else next(iter(settings.metric.split("/")[1:-1]), None)
            if settings is not None and 0 < known == len(own) and (of_set == name or of_set not in texts):
                raise ConfigError(
                    f"{line}, and evaluation.{rule} follows {settings.metric}: evaluate on other problems "
                    f"(`megatron-rl data split` holds some out), or leave evaluation.{rule} out"
                )
        lines += [f"WARNING: {line}"] if known else []
    return lines


def no_answer(place: str, values: Mapping[str, Any]) -> str:
    """Returns the error message for a problem without the answer that the preflight needs. `place`: setting that
    defines the problem's set. `values`: the values of the problem."""
    return (
        f"{place}: a problem has no answer to try the reward with, only {', '.join(sorted(values))}: set fields: "
        "{answer: COLUMN} in this set, or switch this check off by preflight.reward=false"
    )


def try_prompts(name: str, problems: Sequence[Problem], encode: Encode, vocabulary: Vocabulary | None) -> None:
    """Tests whether the problems of the set `name` can be encoded. Encodes one problem of each conversation form
    (sequence of message roles), or all problems if the tokenizer has tokens for which the model of `vocabulary` has no
    embedding row. Raises ConfigError if the tokenizer has no chat template, and DataError if the chat template does not
    render a conversation or a prompt has a token without an embedding row.
    """
    tried = {shape_of(problem.values): problem for problem in reversed(problems)}
    all_of_them = vocabulary is not None and vocabulary.without_row
    for problem in problems if all_of_them else [one for shape, one in tried.items() if shape]:
        try:
            tokens = encode(problem.values)
        except ChatError as error:
            raise DataError(f"{name}, problem {problem.row}: {error}") from error
        if vocabulary is not None and (why := vocabulary.missing(tokens)):
            raise DataError(f"{name}, problem {problem.row}: its prompt has {why}")
