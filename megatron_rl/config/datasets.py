"""Settings of data: problem sets, and prompt/response pairs for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

import pydantic
from pydantic import PositiveInt

from megatron_rl.config.base import Share, config

# The upper bound keeps the sum of the seed and a problem's index below 2^32, numpy's limit for seeds.
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**31)]


@config
class Generated:
    """Settings of the problems that reasoning-gym generates (`reasoning_gym:NAME`)."""

    size: PositiveInt = 1000  # number of problems
    seed: Seed = 0  # seed of the random problems, from 0 to 2^31 - 1
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reasoning-gym data set, such as min_terms


@config
class PromptSet:
    """A set of problems: a JSONL or Parquet file, a directory of such files, a Hugging Face data set, or a set that
    reasoning-gym generates."""

    path: str  # JSONL or Parquet file, directory of such files, Hugging Face data set, or reasoning_gym:NAME
    # Size, seed and arguments of generated problems (path reasoning_gym:NAME); null: the default values
    generated: Generated | None = None
    # Name of ready-made settings for a public data set (fields, filters, answer pattern): eurus2_rl, eurus2_sft,
    # deepscaler, gsm8k, math, last_letter, solutions.
    settings: str | None = None
    # Configuration of a Hugging Face data set; null: the configuration in the ready-made `settings` if there is one,
    # otherwise the only configuration of the data set.
    subset: str | None = None
    # Split of a Hugging Face data set, or of a directory whose files are named train*, test*, ...
    # For reasoning_gym:NAME: train, test or all. The splits train and test have no question in common.
    split: str = "train"
    # Name of a single file of a data set on the hub: only this file of the split is read. null: all files of the split.
    file: str | None = None
    # {field of the problem: key in a row of the data}, such as {question: problem}. Dots in a key select nested values.
    # The field `messages` is a conversation. docs/how_to/your_data.md describes how fields that are not set are found.
    fields: dict[str, str] = field(default_factory=dict)
    # true: every question is sent as the user message of a conversation.
    # false: every prompt is sent as text. A conversation must have a single user message, whose text is sent.
    # null: conversations are sent as conversations, and questions as text.
    chat: bool | None = None
    system: str | None = None  # system message of conversations that have no system message
    filters: dict[str, Any] = field(default_factory=dict)  # {key: value}: keep only rows whose key has this value
    # Regular expression that finds the answer in the row's `answer` field. The answer is group 1 of the last match, or
    # the whole match if the expression has no groups.
    answer_pattern: str | None = None
    # false: remove commas from the answer (1,234 becomes 1234); true: keep commas; null: the value in the ready-made
    # `settings`, otherwise true.
    answer_commas: bool | None = None
    remove_suffix: str | None = None  # text that is removed from the end of every question
    # Maximum number of problems. The first usable rows that pass the filters are taken. null: all rows
    limit: PositiveInt | None = None
    shuffle: bool = True  # shuffle the problems in every epoch; the order depends only on the run's seed
    max_bad_share: Share = 0.01  # stop with an error if a larger fraction of the rows is unusable


@config
class SftData:
    """Training data of SFT: conversations, or prompt/response pairs, as JSONL or Parquet. The loss is computed on the
    assistant's messages, or on the response. For preference learning, rows have `chosen` and `rejected`, or `label`, or
    `reward` (docs/how_to/preferences.md). For process reward models, rows have `completions` and `labels`
    (docs/how_to/reward_models.md)."""

    train: str  # JSONL or Parquet file, directory of such files, or Hugging Face data set
    validation: str | None = None  # data for the validation loss; null: no validation
    # Key of a whole conversation in a row; null: `messages` or `conversations`, if rows have no prompt and response.
    messages_field: str | None = None
    prompt_field: str = "prompt"  # key of the prompt in the row: a text, or the messages before the response
    # Key of the response in the row, a text or messages; null: `response` or `completion`.
    response_field: str | None = None
    # true: append the end-of-sequence token to every response that is a text, and reject conversations whose chat
    # template writes no end-of-turn token. Set false for data that end with a stop string (sampling.stop_strings).
    append_eos: bool = True
    # For a process reward model: text that is appended to each step of a row. The text's last token ends the step.
    step_separator: str = "\n"
    shuffle: bool = True  # shuffle the samples in every epoch
    max_tokens: PositiveInt = 4096  # longer samples are dropped and counted
    max_bad_share: Share = 0.01  # stop with an error if a larger fraction of the rows is unusable
