"""Lists the settings of a config schema with their defaults and source comments, and finds settings by name."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.base import field_comments
from megatron_rl.config.other_names import TRL, VERL


def settings_of(schema: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Returns a list of pairs (`name = default`, comment) for the settings whose dotted name begins with `prefix`.

    In the schema's names, NAME stands for the name of a role. Any role name in `prefix` matches NAME, so
    `roles.solver.layout` finds `roles.NAME.layout`. If no setting's name begins with `prefix`, returns the settings
    that have words beginning with each word of `prefix`: first the settings whose names have them, then names of TRL
    and verl (with the settings that correspond to them as the comment), then the settings whose comments have them.
    """
    rows, parts = list(_rows(schema, "")), [part for part in prefix.split(".") if part]
    names = [text.partition(" = ")[0].split(".") for text, _ in rows]
    count = len(parts)
    begin = [
        row
        for row, name in zip(rows, names, strict=True)
        if len(name) >= count
        and all(part in (word, "NAME") for part, word in zip(name[: count - 1], parts, strict=False))
        and (not parts or name[count - 1] == "NAME" or name[count - 1].startswith(parts[-1]))
    ]
    if begin:
        return begin
    others = [
        (f"{name} ({library})", f"here: {setting.replace('*', 'NAME')}")
        for library, table in (("TRL", TRL), ("verl", VERL))
        for name, setting in table.items()
    ]
    named = [row for row in rows if _has_words(row[0].partition(" = ")[0], prefix)]
    named += [row for row in others if _has_words(row[0], prefix)]
    return named + [row for row in rows if row not in named and _has_words(" ".join(row), prefix)]


def _has_words(text: str, words: str) -> bool:
    """Returns whether the text contains each word of `words` where a word of the text begins. A word such as
    `clip_ratio` matches `clip_ratio_low` and `clip ratio`, but not `ratio_clip`."""
    parts = [re.findall(r"[a-z0-9]+", word) for word in words.lower().split()]
    patterns = [rf"(?<![a-z0-9]){'[^a-z0-9]+'.join(part)}" for part in parts if part]
    return bool(patterns) and all(re.search(pattern, text.lower()) for pattern in patterns)


def _rows(schema: Any, prefix: str, instance: Any = None) -> Iterator[tuple[str, str]]:
    """Yields (`name = default`, comment) of all settings of a section, including nested sections.

    `instance`: an instance of the section, whose field values are yielded as the defaults. If None, the defaults that
    the dataclass declares for its fields are yielded.
    """
    comments, hints = field_comments(schema), typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        comment, hint = comments.get(field.name, ""), hints[field.name]
        inside: list[Any] = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        place = f"{prefix}{field.name}{'.NAME' if typing.get_origin(hint) is dict and inside else ''}"
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if instance is None else getattr(instance, field.name)
        if not inside:
            yield place + ("" if default is dataclasses.MISSING else f" = {json.dumps(default)}"), comment
            continue
        if comment:
            yield place, comment
        if all("kind" in vars(kind) for kind in inside) and len(inside) > 1:
            yield f"{place}.kind = " + " | ".join(json.dumps(kind.kind) for kind in inside), ""
        rows = [
            row for kind in inside for row in _rows(kind, f"{place}.", default if isinstance(default, kind) else None)
        ]
        yield from dict.fromkeys(row for row in rows if len(inside) == 1 or not row[0].startswith(f"{place}.kind "))
