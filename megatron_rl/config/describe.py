"""Describes a schema's settings as text: names, defaults and the comments in the schema's source."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from megatron_rl.config.base import field_comments


def describe(schema: Any) -> str:
    """Returns every setting with its default and its comment in the schema's source, for --help."""
    return "\n".join(["settings, their defaults and what they mean:", *_lines(schema, "")])


def _lines(schema: Any, prefix: str, made: Any = None) -> list[str]:
    """Returns a line for every setting of a section.

    `made`: the instance that stands when the section is not given; None where each field has its own default.
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
