"""Ready-made mappings from the fields of public data sets to ours. What a config sets itself wins over them."""

from __future__ import annotations

import dataclasses

from megatron_rl.config.schema import ConfigError, PromptSet

_GENERATED = "reasoning_gym:"  # the beginning of a path of generated problems
TRAIN, TEST, ALL = "train", "test", "all"  # splits of generated problems

_BOXED_SUFFIX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"

# Settings with one value, which are null when a config leaves them open.
_SINGLE = ("subset", "answer_pattern", "answer_commas", "remove_suffix")


def settings_table() -> dict[str, PromptSet]:
    """Returns the ready-made settings by name. Their path is left empty."""
    return {
        "eurus2_rl": PromptSet(
            path="",
            fields={"question": "prompt.1.content", "answer": "reward_model.ground_truth"},
            filters={"ability": "math"},
            remove_suffix=_BOXED_SUFFIX,
        ),
        "eurus2_sft": PromptSet(
            path="",
            fields={"question": "conversations.0.value", "answer": "conversations.1.value"},
            filters={"task": "Math"},
            remove_suffix=_BOXED_SUFFIX,
        ),
        "deepscaler": PromptSet(path="", fields={"question": "problem", "answer": "answer"}),
        "gsm8k": PromptSet(
            path="",
            fields={"question": "question", "answer": "answer"},
            answer_pattern=r"####\s*(-?[\d.,]+)",
            answer_commas=False,
            subset="main",
        ),
        "math": PromptSet(path="", fields={"question": "problem", "answer": "answer"}),
        "last_letter": PromptSet(path="", fields={"question": "question", "answer": "answer", "words": "words"}),
        "solutions": PromptSet(
            path="", fields={"question": "problem", "answer": "label", "steps": "steps", "label": "label"}
        ),
    }


def resolve(source: PromptSet) -> PromptSet:
    """Returns `source` with its ready-made settings filled in where it sets nothing itself. Where the config names a
    conversation (fields.messages), their question is left out. Generated problems have settings of their own.

    Raises ConfigError for an unknown name of settings.
    """
    if generated_name(source.path) is not None:
        return dataclasses.replace(source, fields={"question": "question", "entry": "entry", **source.fields})
    if source.settings is None:
        return source
    table = settings_table()
    if source.settings not in table:
        raise ConfigError(f"data.settings = {source.settings!r} is not known; there are {', '.join(table)}")
    ready = table[source.settings]
    if "messages" in source.fields:
        ready = dataclasses.replace(ready, fields={k: v for k, v in ready.fields.items() if k != "question"})
    return dataclasses.replace(
        source,
        fields={**ready.fields, **source.fields},
        filters={**ready.filters, **source.filters},
        **{name: getattr(ready, name) for name in _SINGLE if getattr(source, name) is None},
    )


def generated_name(path: str) -> str | None:
    """Returns NAME of a path `reasoning_gym:NAME`; None for any other path."""
    return path.removeprefix(_GENERATED) if path.startswith(_GENERATED) else None


def generated_names(source: PromptSet) -> set[str]:
    """Returns the data sets of reasoning-gym that make the problems of `source`: NAME, or those that a composite one
    mixes; none of other problems."""
    name = generated_name(source.path)
    parts = source.generated.args.get("datasets") if source.generated else None
    mixed = {str(part.get("name")) for part in parts if isinstance(part, dict)} if isinstance(parts, list) else set()
    return set() if name is None else mixed or {name}
