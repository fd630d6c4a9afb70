"""Reads the problems of a run, and turns each into the tokens that the recipe's first role is asked with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.chat_template import ChatError, ChatTokenizer, UserText, tokenize, tokenizer_of
from megatron_rl.config.schema import ConfigError, Model, PromptSet, RoleConfig
from megatron_rl.data.conversations import MESSAGES, shape_of
from megatron_rl.data.problems import Problem, PromptReader, read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.training.iteration import Recipe
from megatron_rl.vocabulary import Vocabulary, check_vocabularies

Encode = Callable[[Mapping[str, Any]], list[int]]  # a problem's values -> its prompt's tokens


def asked_tokenizers(roles: Mapping[str, RoleConfig], tokenizers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokenizers that prompts are made with: those of roles with `chat` put texts into the chat template.
    Raises ConfigError for such a role whose tokenizer has none."""
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
    """Raises ConfigError for a tandem's junior that has other tokens than its senior, as far as tokenizers are here."""
    for name, role in roles.items():
        junior = None if role.tandem is None else role.tandem.junior
        if junior is not None and name in tokenizers and (Path(junior) / "tokenizer.json").is_file():
            why = f"roles.{name}.tandem.junior = {junior}: its model and the senior's write one text"
            check_vocabularies(tokenizers[name], tokenizer_of(Model(path=junior)), why)


def encoder(recipe: Recipe, tokenizer: Any) -> Encode:
    """Returns the function that makes a problem the prompt of the recipe's first role."""
    return lambda values: tokenize(tokenizer, recipe.prompt(values))


def read_sets(
    sets: Mapping[str, PromptSet],
    recipe: Recipe,
    tokenizer: Any | None,
    *,
    held_out: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> dict[str, list[Problem]]:
    """Reads the problem sets of a run, by the names of their settings, and tries one prompt of each form: each sequence
    of roles. Without a tokenizer no prompt is tried.

    Raises what read_problems raises; ConfigError for a tokenizer without a chat template, for conversations where the
    recipe makes its prompts of texts alone, and where `held_out` is asked in another form than the others; DataError
    for a conversation that the chat template does not render, and for a token that the model of `vocabulary` has no row
    for.
    """
    problems = {name: read_problems(source) for name, source in sets.items()}
    for name, own in problems.items():
        if own and MESSAGES in own[0].values and not isinstance(recipe.prompt(own[0].values), UserText):
            first = next(iter(recipe.roles()))
            raise ConfigError(
                f"{name} holds conversations, and this recipe fills a template of its own with the question: set "
                f"{name}.chat to false, and roles.{first}.chat to true where that text shall be a user's message"
            )
        if tokenizer is not None:
            try_prompts(name, own, encoder(recipe, tokenizer), vocabulary)
    chats = {name: MESSAGES in own[0].values for name, own in problems.items() if own}
    for name, chat in chats.items():
        if held_out in chats and chat != chats[held_out] and sets[held_out].chat is None:
            forms = ("texts", "conversations")
            raise ConfigError(
                f"{held_out} holds {forms[chats[held_out]]}, and {name} {forms[chat]}: set {held_out}.chat to "
                f"{str(chat).lower()}, so that a model is measured as it is trained, or to {str(not chat).lower()}"
            )
    return problems


def readers_of(
    recipe: Recipe, tokenizer: Any, sets: Mapping[str, PromptSet], problems: Mapping[str, Sequence[Problem]], *,
    max_prompt_tokens: int, seed: int,
) -> dict[str, PromptReader]:  # fmt: skip
    """Returns a reader for each problem set, by the names of their settings.

    `max_prompt_tokens`: the longest prompt of the recipe's first role. Raises DataError for a set in which a larger
    share of prompts than its max_bad_share is longer.
    """
    role, encode = next(iter(recipe.roles())), encoder(recipe, tokenizer)
    readers = {
        name: PromptReader(
            problems[name], encode, seed=seed, shuffle=source.shuffle, max_prompt_tokens=max_prompt_tokens
        )
        for name, source in sets.items()
    }
    for name, reader in readers.items():
        reader.refuse_long(f"roles.{role}.max_prompt_tokens", sets[name].max_bad_share, f"{name} ({sets[name].path})")
    return readers


def try_prompts(name: str, problems: Sequence[Problem], encode: Encode, vocabulary: Vocabulary | None) -> None:
    """Encodes one problem of each form of conversation: each sequence of roles; all problems where the tokenizer has
    tokens that the model of `vocabulary` has no row for. Raises what `read_sets` raises."""
    tried = {shape_of(problem.values): problem for problem in reversed(problems)}
    all_of_them = vocabulary is not None and vocabulary.without_row
    for problem in problems if all_of_them else [one for shape, one in tried.items() if shape]:
        try:
            tokens = encode(problem.values)
        except ChatError as error:
            raise DataError(f"{name}, problem {problem.row}: {error}") from error
        if vocabulary is not None and (why := vocabulary.missing(tokens)):
            raise DataError(f"{name}, problem {problem.row}: its prompt has {why}")
