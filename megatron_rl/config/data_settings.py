"""Ready-made settings for public data sets (field names, filters, answer patterns). Values in a config override the
ready-made values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from megatron_rl.config.schema import ConfigError, PromptSet

_GENERATED = "reasoning_gym:"  # prefix of data.path for problems that reasoning-gym generates
TRAIN, TEST, ALL = "train", "test", "all"  # splits of generated problems

# Settings of a PromptSet for which a null value means the ready-made value.
_SINGLE = ("subset", "answer_pattern", "answer_commas", "remove_suffix")


def settings_table() -> dict[str, PromptSet]:
    """Returns {name: ready-made settings} of the public data sets. The setting `path` of each PromptSet is empty."""
    table = yaml.load(Path(__file__).with_name("data_settings.yaml").read_text("utf-8"), yaml.CSafeLoader)
    return {name: PromptSet(path="", **settings) for name, settings in table.items()}


def resolve(source: PromptSet) -> PromptSet:
    """Returns the problem set `source`, completed with the ready-made settings named by `source.settings`. Values that
    `source` sets override the ready-made values.

    If `source` sets fields.messages (the key of a conversation in a row), the `question` field of the ready-made
    settings is left out. Generated problems (`reasoning_gym:NAME`) get the fields `question` and `entry`. Raises
    ConfigError if `source.settings` is unknown.
    """
    if generated_name(source.path) is not None:
        return dataclasses.replace(source, fields={"question": "question", "entry": "entry", **source.fields})
    if source.settings is None:
        return source
    ready = settings_table().get(source.settings)
    if ready is None:
        raise ConfigError(f"data.settings = {source.settings!r} is unknown; known are {', '.join(settings_table())}")
    left_out = {"question"} if "messages" in source.fields else {}
    return dataclasses.replace(
        source,
        fields={**{key: name for key, name in ready.fields.items() if key not in left_out}, **source.fields},
        filters={**ready.filters, **source.filters},
        **{name: getattr(ready, name) for name in _SINGLE if getattr(source, name) is None},
    )


def generated_name(path: str) -> str | None:
    """Returns NAME if the path is `reasoning_gym:NAME`, otherwise None."""
    return path.removeprefix(_GENERATED) if path.startswith(_GENERATED) else None


def generated_names(source: PromptSet) -> set[str]:
    """Returns the names of the reasoning-gym data sets that generate the problems of `source`.

    For the path reasoning_gym:NAME, the result is {NAME}; if NAME is a composite data set, the result is the names of
    the data sets that NAME mixes. Returns an empty set if the problems are not generated.
    """
    name = generated_name(source.path)
    parts = source.generated.args.get("datasets") if source.generated else None
    mixed = {str(part.get("name")) for part in parts if isinstance(part, dict)} if isinstance(parts, list) else set()
    return set() if name is None else mixed or {name}
