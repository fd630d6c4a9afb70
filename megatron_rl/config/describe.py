"""Lists the settings of a config schema with their defaults and source comments, and finds settings by name."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from typing import Any

from megatron_rl.config.base import field_comments


def describe(schema: Any) -> str:
    """Returns a text with one line per setting: its name, its default, and its comment in the schema's source."""
    return "\n".join(["settings, their defaults and what they mean:", *_lines(schema, "")])


def settings_of(schema: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Returns a list of pairs (`name = default`, comment) for the settings whose dotted name begins with `prefix`.

    The schema's names have NAME in place of a role's name; any role name in `prefix` matches NAME, so
    `roles.solver.layout` finds `roles.NAME.layout`. If no setting's name begins with `prefix`, returns the settings
    whose name contains it; if there are none either, returns an empty list.
    """
    rows = [_row(line.strip()) for line in describe(schema).splitlines()[1:]]
    words = [word for word in prefix.split(".") if word]
    for fits in (_begins, _holds):
        if chosen := [row for row in rows if fits(row[0].partition(" = ")[0].split("."), words)]:
            return chosen
    return []


def _row(line: str) -> tuple[str, str]:
    """Splits a line of `describe` into (setting, comment). The line of a section has the form `name: comment`."""
    if section := re.match(r"([\w.]+): (.*)", line):
        return section[1], section[2]
    text, _, comment = line.partition("  # ")
    return text, comment


def _begins(parts: list[str], words: list[str]) -> bool:
    return len(words) <= len(parts) and all(
        part in (word, "NAME") or (place == len(words) - 1 and part.startswith(word))
        for place, (part, word) in enumerate(zip(parts, words, strict=False))
    )


def _holds(parts: list[str], words: list[str]) -> bool:
    return any(parts[place : place + len(words)] == words for place in range(len(parts)))


def _lines(schema: Any, prefix: str, made: Any = None) -> list[str]:
    """Returns the lines of all settings of a section, including nested sections.

    `made`: the instance that is the default of the whole section; None if the defaults of its fields apply.
    """
    comments, hints, out = field_comments(schema), typing.get_type_hints(schema), []
    for field in dataclasses.fields(schema):
        comment = comments.get(field.name)
        inside: list[Any] = [
            kind for kind in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(kind)
        ]
        place = f"{prefix}{field.name}{'.NAME' if typing.get_origin(hints[field.name]) is dict and inside else ''}"
        default = getattr(made, field.name) if made is not None else _default(field)
        if inside:
            out += [f"  {place}: {comment}"] if comment else []
            if len(inside) > 1:
                out.append(f"  {place}.kind = " + " | ".join(json.dumps(kind.kind) for kind in inside))
            for kind in inside:
                lines = _lines(kind, f"{place}.", default if isinstance(default, kind) else None)
                out += [
                    line
                    for line in lines
                    if line not in out and not (len(inside) > 1 and line.startswith(f"  {place}.kind "))
                ]
        else:
            value = "" if default is dataclasses.MISSING else f" = {json.dumps(default)}"
            out.append(f"  {place}{value}{'  # ' + comment if comment else ''}")
    return out


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
