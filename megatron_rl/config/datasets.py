"""Settings of data: problem sets, and prompt/response pairs for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

import pydantic
from pydantic import PositiveInt

from megatron_rl.config.base import Share, config

Seed = Annotated[int, pydantic.Field(ge=0, lt=2**31)]  # with the number of a draw added it stays below numpy's limit


@config
class Generated:
    """The problems of a path `reasoning_gym:NAME`: how many, and how they are drawn."""

    size: PositiveInt = 1000  # number of problems
    seed: Seed = 0  # of the draws, 0 to 2^31 - 1
    args: dict[str, Any] = field(default_factory=dict)  # settings of the data set NAME itself, such as min_terms


@config
class PromptSet:
    """A set of problems. `path` is a JSONL or Parquet file, a directory of them, a Hugging Face data set, or one that
    reasoning-gym generates."""

    path: str  # JSONL or Parquet file, directory of them, Hugging Face data set, or reasoning_gym:NAME
    generated: Generated | None = None  # size, seed and settings of reasoning_gym:NAME; null: their defaults
    # Name of a ready-made mapping: eurus2_rl, eurus2_sft, deepscaler, gsm8k, math, last_letter, solutions.
    settings: str | None = None
    subset: str | None = None  # configuration of a Hugging Face data set; null: that of `settings`, else its only one
    # Split of a Hugging Face data set, or of a directory with files train*, test*, ...; of reasoning_gym:NAME train and
    # test, which have no question in common, or all.
    split: str = "train"
    # One file of a data set on the hub, where its splits hold other files, too; null: the split's files.
    file: str | None = None
    # Our field name -> the row's key; dots reach inside nested values. Example: {question: problem}. `messages` names a
    # conversation. What is left open is found as docs/your_data.md says.
    fields: dict[str, str] = field(default_factory=dict)
    # true: every question is the user's message of a conversation. false: also what the rows hold as conversations is
    # put as text, by its last user's message. null: conversations and questions are put as what they are.
    chat: bool | None = None
    system: str | None = None  # system message of the conversations that have none of their own
    filters: dict[str, Any] = field(default_factory=dict)  # keep only rows whose key has this value
    # Regular expression that finds the answer: group 1 of its last match, or the whole match where it has no groups.
    answer_pattern: str | None = None
    # false: take commas out of the answer (1,234 becomes 1234); null: as `settings` has it, else true.
    answer_commas: bool | None = None
    remove_suffix: str | None = None  # text that is cut from the end of every question
    limit: PositiveInt | None = None  # largest number of problems: the first usable rows that pass the filters
    shuffle: bool = True  # give the problems a new order in every epoch, the same in every run with this seed
    max_bad_share: Share = 0.01  # refuse the set when a larger share of its rows is unusable


@config
class SftData:
    """Conversations, or pairs of prompt and response, as JSONL or Parquet. The loss is on what an assistant wrote, or
    on the response."""

    train: str  # JSONL or Parquet file, directory of them, or Hugging Face data set
    validation: str | None = None  # data for the validation loss; null: none
    # The row's key of a whole conversation; null: messages or conversations, where rows have no prompt and response.
    messages_field: str | None = None
    prompt_field: str = "prompt"  # the row's key of the prompt: a text, or the messages before the response
    response_field: str | None = None  # the row's key of the response, text or messages; null: response or completion
    # Put the end-of-sequence token behind every response that is a text, and refuse conversations whose chat template
    # writes no token that ends a turn. false: texts of the data end what the model writes (sampling.stop_strings).
    append_eos: bool = True
    shuffle: bool = True  # give the samples a new order in every epoch
    max_tokens: PositiveInt = 4096  # longer samples are dropped and counted
    max_bad_share: Share = 0.01  # refuse the data when a larger share of its rows is unusable
