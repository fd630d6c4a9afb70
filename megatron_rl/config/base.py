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
# Maximum length of a file name, in bytes. File systems allow 255 bytes; the difference is reserved for suffixes that
# are appended to file names.
LONGEST_NAME = 200
_USER = re.compile(r"://[^/\s@'\"]+@")  # the user and password in a URL
UNREADABLE = (OSError, ValueError, RecursionError)  # errors of reading and parsing a text file
MOST_JSON_BYTES = 64 << 20  # maximum size of a JSON file that describes a model or an adapter
Share = Annotated[float, pydantic.Field(ge=0, le=1)]  # a fraction of a whole, 0 to 1
Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]  # decay factor of a moving average, which moves if it is below 1
NotNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
PositiveShare = Annotated[float, pydantic.Field(gt=0, le=1)]
# A number of updates, samples or rounds. It is bounded, because a schedule is a list with one entry per update.
Count = Annotated[int, pydantic.Field(ge=1, le=10**6)]
CountOrZero = Annotated[int, pydantic.Field(ge=0, le=10**6)]


class ConfigError(ValueError):
    """A setting is invalid. The message names the setting, its value and how to correct it."""


def refuse(*problems: str) -> None:
    """Raises ConfigError with the error messages `problems`, one per line. Returns if there are no messages."""
    if problems:
        raise ConfigError("\n  ".join(problems))


@contextlib.contextmanager
def refusing(say: Callable[[Exception], str], *kinds: type[Exception]) -> Iterator[None]:
    """Context manager that converts an exception of one of the types `kinds` to a ConfigError with the message
    `say(exception)`. A ConfigError is not converted."""
    try:
        yield
    except kinds as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(say(error)) from error


def refusal_of(check: Callable[..., object], *args: object, place: str = "") -> list[str]:
    """Calls a function that checks settings. If it raises ConfigError, returns a list of one message, which begins with
    `place`; otherwise an empty list."""
    try:
        check(*args)
    except ConfigError as error:
        return [f"{place}{error}"]
    return []


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """Returns the text "did you mean ...?" with the name in `known` that is most similar to `name`, or the text
    `otherwise` if there is no similar name."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def not_finite(value: Any, place: str) -> Iterator[str]:
    """Yields an error message for each number in nested values that is not finite. `place`: dotted name of `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} = {value}: give a finite number"
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from not_finite(part, f"{place}.{name}")


def path_problems(setting: str, path: str) -> Iterator[str]:
    """Yields an error message if a path is blank, has control characters, begins with `-` (as options do), or has a
    name of more than LONGEST_NAME bytes. `setting`: name of the setting that contains the path."""
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

    If the class has a method `problems`, which yields error messages about an instance, an instance with problems
    cannot be made: the constructor raises ConfigError with all messages. A class with its own `__post_init__` must call
    `refuse(*self.problems())` there.
    """
    made: Any = cls
    made.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    if hasattr(cls, "problems") and "__post_init__" not in vars(cls):
        made.__post_init__ = lambda self: refuse(*self.problems())
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
        found: Any = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {str(found)[:40]!r} where a JSON object must stand: fetch it again")
    return found


@config
class Use:
    """A plug-in: the name of a Python object, and the arguments with which it is built or called."""

    target: str  # the object's name as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the object

    def problems(self) -> Iterator[str]:
        """Yields an error message for each argument that is not a finite number."""
        return not_finite(self.args, "args")


def sections(settings: Any, kind: type[C], place: str = "") -> dict[str, C]:
    """Returns {dotted name: section} of the sections of the type `kind` in a config. `place`: dotted name of
    `settings`."""
    if isinstance(settings, kind):
        return {place: settings}
    parts = vars(settings) if dataclasses.is_dataclass(settings) else settings if isinstance(settings, dict) else {}
    found: dict[str, C] = {}
    for name, part in parts.items():
        found |= sections(part, kind, f"{place}.{name}" if place else str(name))
    return found


def field_comments(schema: type) -> dict[str, str]:
    """Returns {field name: comment} of a config dataclass. The command `megatron-rl settings` and the option `--help`
    print these comments.

    A field's comment is at the end of the field's line, or on the lines directly above it. Inherited fields are
    included. Fields without a comment are left out.
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
