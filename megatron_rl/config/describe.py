"""Lists the settings of a config schema with their defaults and source comments, and finds settings by name."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.base import field_comments


def settings_of(schema: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Returns a list of pairs (`name = default`, comment) for the settings whose dotted name begins with `prefix`.

    In the schema's names, NAME stands for the name of a role. Any role name in `prefix` matches NAME, so
    `roles.solver.layout` finds `roles.NAME.layout`. If no setting's name begins with `prefix`, returns the settings
    whose name contains `prefix`. If no name contains `prefix`, returns an empty list.
    """
    rows, words = list(_rows(schema, "")), [word for word in prefix.split(".") if word]
    names = [text.partition(" = ")[0].split(".") for text, _ in rows]
    count = len(words)
    begin = [
        row
        for row, name in zip(rows, names, strict=True)
        if len(name) >= count
        and all(part in (word, "NAME") for part, word in zip(name[: count - 1], words, strict=False))
        and (not words or name[count - 1] == "NAME" or name[count - 1].startswith(words[-1]))
    ]
    return begin or [
        row
        for row, name in zip(rows, names, strict=True)
        if any(name[place : place + count] == words for place in range(len(name)))
    ]


def _rows(schema: Any, prefix: str, made: Any = None) -> Iterator[tuple[str, str]]:
    """Yields (`name = default`, comment) of all settings of a section, including nested sections.

    `made`: an instance of the section, whose field values are yielded as the defaults. If None, the defaults that the
    dataclass declares for its fields are yielded.
    """
    comments, hints = field_comments(schema), typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        comment, hint = comments.get(field.name, ""), hints[field.name]
        inside: list[Any] = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        place = f"{prefix}{field.name}{'.NAME' if typing.get_origin(hint) is dict and inside else ''}"
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if made is None else getattr(made, field.name)
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
