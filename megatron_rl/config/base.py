"""The common base of the config dataclasses: the decorator `config`, the exception ConfigError, and types that several
sections of a config use."""

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
# Maximum length of a file name, in bytes. File systems allow 255 bytes; the difference is reserved for suffixes that
# are appended to file names.
LONGEST_NAME = 200
_USER = re.compile(r"://[^/\s@'\"]+@")  # the user and password in a URL
MOST_JSON_BYTES = 64 << 20  # maximum size of a JSON file that describes a model or an adapter
Share = Annotated[float, pydantic.Field(ge=0, le=1)]  # a fraction of a whole, 0 to 1


class ConfigError(ValueError):
    """A setting is invalid. The message names the setting, its value and how to correct it."""


def check_path(setting: str, path: str) -> None:
    """Raises ConfigError if a path is blank, has control characters, begins with `-` (as options do), or has a name of
    more than LONGEST_NAME bytes. `setting`: name of the setting that contains the path, for the error message."""
    if not path.isprintable() or not path.strip():
        raise ConfigError(f"{setting} = {path!r}: give a name without line breaks or other control characters")
    if path.startswith("-"):
        raise ConfigError(f"{setting} = {path!r}: a name that begins with - looks like an option; put ./ before it")
    if long := [part for part in path.split("/") if len(part.encode()) > LONGEST_NAME]:
        raise ConfigError(
            f"{setting}: {long[0][:40]!r}... has {len(long[0].encode())} bytes; give a name of up to {LONGEST_NAME}"
        )


def without_passwords(text: str) -> str:
    """Returns the text with the user and password of each URL replaced by ***."""
    return _USER.sub("://***@", text)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Class decorator: makes a frozen, keyword-only dataclass. When an instance is parsed from a config file, unknown
    keys, wrong types, and NaN or infinite numbers are errors."""
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    cls.__pydantic_config__ = strict  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises ConfigError if the file cannot be read, is larger than MOST_JSON_BYTES, or is not a JSON object.
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
    """A plug-in: the name of a Python object, and the arguments with which it is built or called."""

    target: str  # the object's name as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the object


def field_comments(schema: type) -> dict[str, str]:
    """Returns {field name: comment} of a config dataclass. The command `megatron-rl settings` and the option `--help`
    print these comments.

    A field's comment is at the end of the field's line, or on the lines directly above it. Inherited fields are
    included. Fields without a comment are left out.
    """
    comments: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if dataclasses.is_dataclass(kind):
            comments |= _comments(inspect.getsource(kind))
    return comments


def _comments(source: str) -> dict[str, str]:
    """Returns {field name: comment} from the source text of one class."""
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
