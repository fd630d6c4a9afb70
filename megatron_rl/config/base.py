"""The common base of the config dataclasses: the decorator `config`, the exception ConfigError, and types that several
sections of a config use."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic

C = TypeVar("C")
# Maximum length of a file name, in bytes. File systems allow 255 bytes.
# The other 55 bytes are reserved for suffixes that are appended to file names.
LONGEST_NAME = 200
_USER = re.compile(r"://[^/\s@'\"]+@")  # the user and password in a URL
UNREADABLE = (OSError, ValueError, RecursionError)  # exceptions raised while a text file is read and parsed
MOST_JSON_BYTES = 64 << 20  # maximum size of a JSON file that describes a model or an adapter
Share = Annotated[float, pydantic.Field(ge=0, le=1)]  # a fraction of a whole, 0 to 1
Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]  # decay factor of a moving average, which 1 would freeze
NotNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
PositiveShare = Annotated[float, pydantic.Field(gt=0, le=1)]
# A number of updates, samples or rounds. The upper bound limits memory: a schedule is a list with one entry per update.
Count = Annotated[int, pydantic.Field(ge=1, le=10**6)]
CountOrZero = Annotated[int, pydantic.Field(ge=0, le=10**6)]


class ConfigError(ValueError):
    """Raised when a setting is invalid. The message names the setting, its value and how to correct it."""


def refuse(*problems: str) -> None:
    """Raises ConfigError with the error messages `problems`, one per line. Does nothing if there are no messages."""
    if problems:
        raise ConfigError("\n  ".join(problems))


@contextlib.contextmanager
def refusing(say: Callable[[Exception], str], *kinds: type[Exception]) -> Iterator[None]:
    """Context manager that converts an exception of one of the types `kinds` to a ConfigError with the message
    `say(exception)`. A ConfigError passes through unchanged."""
    try:
        yield
    except kinds as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(say(error)) from error


def refusal_of(check: Callable[..., object], *args: object, place: str = "") -> list[str]:
    """Calls `check(*args)`, a function that checks settings. If the function raises ConfigError, returns a list of one
    error message, which begins with `place`. Otherwise returns an empty list."""
    try:
        check(*args)
    except ConfigError as error:
        return [f"{place}{error}"]
    return []


def hint(name: str, names: Iterable[str], otherwise: str) -> str:
    """Returns the text "did you mean ...?" with the name in `names` that is most similar to `name`, or the text
    `otherwise` if there is no similar name."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def not_finite(value: Any, place: str) -> Iterator[str]:
    """Yields an error message for each NaN or infinite number in the nested values of a setting.

    `value`: the setting's value. `place`: the setting's dotted name.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} = {value}: give a finite number"
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from not_finite(part, f"{place}.{name}")


def path_problems(setting: str, path: str) -> Iterator[str]:
    """Yields an error message if a path is blank, has control characters, begins with `-` (like a command-line option),
    or has a component of more than LONGEST_NAME bytes. `setting`: name of the setting that contains the path."""
    if not path.isprintable() or not path.strip():
        yield f"{setting} = {path!r}: give a name without line breaks or other control characters"
    elif path.startswith("-"):
        yield f"{setting} = {path!r}: a name that begins with - looks like an option; put ./ before it"
    elif long := [part for part in path.split("/") if len(part.encode()) > LONGEST_NAME]:
        yield f"{setting}: {long[0][:40]!r}... has {len(long[0].encode())} bytes; give a name of up to {LONGEST_NAME}"


def without_passwords(text: str) -> str:
    """Returns the text with the user and password of each URL replaced by ***."""
    return _USER.sub("://***@", text)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Class decorator: makes a frozen, keyword-only dataclass. When an instance is parsed from a config file, unknown
    keys, wrong types, and NaN or infinite numbers are errors.

    The class may have a method `problems`, which yields error messages about an instance. If the method yields any, the
    constructor raises ConfigError with all messages. A class that defines `__post_init__` must call
    `refuse(*self.problems())` in its `__post_init__`.
    """
    schema: Any = cls
    schema.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    if hasattr(cls, "problems") and "__post_init__" not in vars(cls):
        schema.__post_init__ = lambda self: refuse(*self.problems())
    return dataclass(frozen=True, kw_only=True)(cls)


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises ConfigError if the file cannot be read, is larger than MOST_JSON_BYTES, or is not a JSON object.
    """

    def refuse_constant(name: str) -> None:
        raise json.JSONDecodeError(f"{name} is no number of JSON", name, 0)

    with refusing(lambda error: f"{file} cannot be read as JSON ({error}): fetch it again", *UNREADABLE):
        if (size := file.stat().st_size) > MOST_JSON_BYTES:
            raise ConfigError(f"{file} has {size} bytes, and at most {MOST_JSON_BYTES} are read: is it another file?")
        value: Any = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {str(value)[:40]!r} where a JSON object must stand: fetch it again")
    return value


@config
class Use:
    """A plug-in: the name of a Python function or class, and keyword arguments for it."""

    target: str  # name of the function or class as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function or class

    def problems(self) -> Iterator[str]:
        """Yields an error message for each argument that is not a finite number."""
        return not_finite(self.args, "args")


def sections(settings: Any, kind: type[C], place: str = "") -> dict[str, C]:
    """Returns {dotted name: section} of all sections of a config that are instances of `kind`. `settings`: the config
    or a section. `place`: the dotted name of `settings`; empty for the config."""
    if isinstance(settings, kind):
        return {place: settings}
    parts = vars(settings) if dataclasses.is_dataclass(settings) else settings if isinstance(settings, dict) else {}
    by_name: dict[str, C] = {}
    for name, part in parts.items():
        by_name |= sections(part, kind, f"{place}.{name}" if place else str(name))
    return by_name


def field_comments(schema: type) -> dict[str, str]:
    """Returns {field name: comment} of a config dataclass. The command `megatron-rl settings` and the option `--help`
    print these comments.

    The comment of a field is at the end of the field's line, or on the lines directly above the field. Inherited fields
    are included. Fields without a comment are left out.
    """
    comments: dict[str, str] = {}
    above: list[str] = []
    sources = (inspect.getsource(kind) for kind in reversed(schema.__mro__) if dataclasses.is_dataclass(kind))
    for line in (line for source in sources for line in source.splitlines()):
        if text := re.match(r"    # (.*)$", line):
            above.append(text[1])
            continue
        behind = re.search(r"  # (.*)$", line)
        if (name := re.match(r"    (\w+): ", line)) and (above or behind):
            comments[name[1]] = " ".join(above) or behind[1]  # type: ignore[index]
        above = []
    return comments
