"""Reading configs: defaults <- YAML files, left to right <- `a.b=c`; every problem at once, with the value and the cure. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from megatron_rl.config import ConfigError

T = TypeVar("T")

_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number and a key may stand only once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
        twice = sorted({str(k) for k in keys if keys.count(k) > 1})
        if twice:
            raise ConfigError(f"{self.name}, line {node.start_mark.line + 1}: {', '.join(twice)} is given twice; keep one")
        return super().construct_mapping(node, deep=deep)


def _float_resolvers() -> dict[str, list[Any]]:
    """SafeLoader's implicit resolvers with YAML 1.2's floats: 1e-6 and 1E3 too."""
    float_tag = "tag:yaml.org,2002:float"
    table = {c: [r for r in rules if r[0] != float_tag] for c, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    for character in "-+0123456789.":
        table.setdefault(character, []).append((float_tag, _FLOAT))
    return table


_Loader.yaml_implicit_resolvers = _float_resolvers()


def load(schema: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> T:
    """A validated `schema` from its defaults, YAML files and `a.b=c` overrides.

    A file's `base: other.yaml` (relative to the file; or a list) is read before it. Merging is by key; when an override changes a
    union's `kind`, the old variant's fields are dropped. Raises ConfigError naming every unknown key, wrong type and bad value.
    """
    tree: dict[str, Any] = {}
    for file in files:
        tree = _merge(tree, _read(Path(file), ()))
    for override in overrides:
        tree = _merge(tree, _override(override))
    try:
        # JSON mode is strict about types and still takes lists for tuples.
        return pydantic.TypeAdapter(schema).validate_json(json.dumps(tree))
    except pydantic.ValidationError as error:
        where = ", ".join([*map(str, files), *overrides]) or "the defaults"
        lines = sorted({_explain_error(schema, problem) for problem in error.errors()})
        raise ConfigError(f"{where}:\n  " + "\n  ".join(lines)) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{', '.join(map(str, files))}: {error}") from error


def dump(config: Any) -> str:
    """The whole resolved config as YAML; `load` of it gives an equal value."""
    tree = json.loads(pydantic.TypeAdapter(type(config)).dump_json(config))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def read_keys(files: Sequence[Path]) -> set[str]:
    """Top-level keys of YAML files and of their bases."""
    return {key for file in files for key in _read(Path(file), ())}


def _read(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = file.resolve()
    if path in seen:
        raise ConfigError(f"{file}: base files form a circle: {' -> '.join(p.name for p in (*seen, path))}")
    if not file.is_file():
        raise ConfigError(f"no such config file: {file}")
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        loader.name = str(file)
        tree = loader.get_single_data() or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a config is a mapping of keys, not {type(tree).__name__}")
    bases = tree.pop("base", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = _merge(merged, _read(file.parent / base, (*seen, path)))
    return _merge(merged, tree)


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r}: it has the form a.b=value")
    try:
        tree: Any = _Loader(value).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not YAML: {error}") from error
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    if "kind" in new and new["kind"] != old.get("kind", new["kind"]):
        old = {}
    out = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merge(out[key], value) if both else value
    return out


def _explain_error(schema: Any, problem: Any) -> str:
    place = [str(p) for p in problem["loc"]]
    name = ".".join(place) or "(whole config)"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields_at(schema, place[:-1])
        close = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{name}: unknown key; {hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{name}: missing; it has no default"
    message = problem["msg"].removeprefix("Value error, ")
    return message if problem["type"] == "value_error" else f"{name} = {json.dumps(problem['input'], default=str)[:80]}: {message}"


def _fields_at(schema: Any, place: Sequence[str]) -> list[str]:
    """Names of the dataclass fields at a dotted place, through dicts and unions."""
    kinds = [schema]
    for part in place:
        found: list[Any] = []
        for kind in kinds:
            if dataclasses.is_dataclass(kind):
                hints = typing.get_type_hints(kind)
                found += _alternatives(hints[part]) if part in hints else []
            elif typing.get_origin(kind) is dict:
                found += _alternatives(typing.get_args(kind)[1])
        kinds = found or kinds
    return [f.name for kind in kinds if dataclasses.is_dataclass(kind) for f in dataclasses.fields(kind)]


def _alternatives(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [a for arg in typing.get_args(kind) for a in _alternatives(arg)]
    return [kind]
