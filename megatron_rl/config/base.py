"""The foundation of the config's dataclasses: the decorator, the error, and types that several sections share."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic

C = TypeVar("C")
LONGEST_NAME = 200  # bytes of a file's name: file systems take 255, and some files add an ending
_USER = re.compile(r"://[^/\s@'\"]+@")  # user and password of a URL
MOST_JSON_BYTES = 64 << 20  # of a file that describes a model or an adapter
Share = Annotated[float, pydantic.Field(ge=0, le=1)]  # a fraction of a whole, 0 to 1


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the key, the value and the cure."""


def check_path(setting: str, path: str) -> None:
    """Raises ConfigError for a path that programs or file systems refuse or take for something else."""
    if not path.isprintable() or not path.strip():
        raise ConfigError(f"{setting} = {path!r}: give a name without line breaks or other control characters")
    if path.startswith("-"):
        raise ConfigError(f"{setting} = {path!r}: a name that begins with - looks like an option; put ./ before it")
    if long := [part for part in path.split("/") if len(part.encode()) > LONGEST_NAME]:
        raise ConfigError(
            f"{setting}: {long[0][:40]!r}... has {len(long[0].encode())} bytes; give a name of up to {LONGEST_NAME}"
        )


def without_passwords(text: str) -> str:
    """Returns the text with *** in the place of the user and the password of each URL in it."""
    return _USER.sub("://***@", text)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Makes a frozen keyword-only dataclass. When it is read from a file, unknown keys and wrong types are refused."""
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    cls.__pydantic_config__ = strict  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises ConfigError when the file cannot be read, is larger than MOST_JSON_BYTES, or holds anything else.
    """
    try:
        if (size := file.stat().st_size) > MOST_JSON_BYTES:
            raise ConfigError(f"{file} has {size} bytes, and at most {MOST_JSON_BYTES} are read: is it another file?")
        found: Any = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}): fetch it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {str(found)[:40]!r} where a JSON object must stand: fetch it again")
    return found


def _refuse_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no number of JSON", name, 0)


@config
class Use:
    """A plug-in: the name of a Python object, and the arguments that it is built or called with."""

    target: str  # the object's name as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for it


def field_comments(schema: type) -> dict[str, str]:
    """Returns the comment of each field of a config dataclass, by the field's name; `--help` prints them.

    A field's comment stands behind it on the same line, or on the lines directly above it. Inherited fields are
    included. Fields without a comment are left out.
    """
    comments: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if dataclasses.is_dataclass(kind):
            comments |= _comments(inspect.getsource(kind))
    return comments


def _comments(source: str) -> dict[str, str]:
    """Reads the comments of fields out of one class's source text."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        if text := re.match(r"    # (.*)$", line):
            above.append(text[1])
            continue
        if name := re.match(r"    (\w+): ", line):
            behind = re.search(r"  # (.*)$", line)
            if above or behind:
                comments[name[1]] = " ".join(above) or behind[1]  # type: ignore[index]
        above = []
    return comments
