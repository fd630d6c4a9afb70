"""Loads configs: defaults, then YAML files from left to right, then `a.b=c` overrides. Later values override earlier.

All problems of a config are reported in one error, each with the value and how to correct it. This module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pydantic
import yaml

from megatron_rl.config.base import without_passwords
from megatron_rl.config.schema import ConfigError

T = TypeVar("T")
MAX_DEPTH = 64  # maximum nesting depth of values
MAX_VALUES = 50_000  # maximum number of values in one YAML text after its aliases are expanded
MAX_BYTES = 2 << 20  # maximum size of one file
MAX_FILES = 100  # maximum number of files of one config, including files named by `base`
MAX_INT = 2**63 - 1  # maximum absolute value of an integer


class _Source(NamedTuple):
    """The settings of one file, tree or override, and the label that error messages give it."""

    label: str
    tree: dict[str, Any]


# Patterns of the scalars of YAML 1.2 (int, float, bool). PyYAML follows YAML 1.1, which parses 1e-6 as text, 12:30 as
# 750, 010 as 8, `no` as false and 2024-01-01 as a date.
_INT = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$|^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")


class _Loader(yaml.SafeLoader):
    """A safe YAML loader with the scalars of YAML 1.2 (1e-6 is a number). Keys that are not text, duplicate keys, and
    values that are too deep or too large after aliases are expanded are errors."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_document(self) -> yaml.Node:
        """Composes the document. Raises ConfigError if it has more than MAX_VALUES values with its aliases expanded."""
        root = super().compose_document()
        assert root is not None
        self._count(root, {}, set())
        return root

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"{self.name}: values are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
        where = f"{self.name}, line {node.start_mark.line + 1}"
        for key in keys:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: the key {str(key)[:80]} is no text: put it in quotes")
        if twice := sorted(key for key, count in Counter(keys).items() if count > 1):
            raise ConfigError(f"{where}: {', '.join(twice)} is given twice; keep one")
        return super().construct_mapping(node, deep=deep)

    def _count(self, node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
        """Returns the number of values in a node with its aliases expanded. `known`: {id: count} of the nodes that were
        counted already. `above`: ids of the nodes that contain this node."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in above:
            raise ConfigError(f"{self.name}: an alias names what it lies in itself")
        if id(node) not in known:
            above.add(id(node))
            parts = (
                node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
            )
            known[id(node)] = 1 + sum(self._count(part, known, above) for part in parts)
            above.remove(id(node))
        if known[id(node)] > MAX_VALUES:
            raise ConfigError(
                f"{self.name}: more than {MAX_VALUES} values, with aliases written out: a config is small"
            )
        return known[id(node)]


class _Dumper(yaml.SafeDumper):
    """A safe YAML dumper that quotes every text which YAML 1.1 or 1.2 would parse as a number, boolean or date."""


def _resolvers() -> dict[str, list[Any]]:
    """Returns SafeLoader's table {first character: [(tag, pattern)]} with the scalars of YAML 1.2 instead of 1.1."""
    ours = {
        "int": (_INT, "-+0123456789"),
        "float": (_FLOAT, "-+0123456789."),
        "bool": (_BOOL, "tTfF"),
        "timestamp": (None, ""),
    }
    tags = {f"tag:yaml.org,2002:{name}" for name in ours}
    table = {c: [r for r in rules if r[0] not in tags] for c, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    for name, (pattern, characters) in ours.items():
        for character in characters:
            table.setdefault(character, []).append((f"tag:yaml.org,2002:{name}", pattern))
    return table


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    quoted = any(pattern.match(text) for pattern in (_INT, _FLOAT, _BOOL))
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Loader.yaml_implicit_resolvers = _resolvers()
_Dumper.add_representer(str, _represent_text)


def load(
    schema: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = (),
    *, trees: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> T:  # fmt: skip
    """Returns a validated instance of `schema` from the schema's defaults, YAML files, `trees` and `a.b=c` overrides.

    `trees`: pairs (label, settings), in which `settings` are nested mappings as in a file; error messages use `label`.

    If a file has the key `base` (a path relative to the file, or a list of paths), the base files are loaded before the
    file. Mappings are merged key by key. In a union of dataclasses (`Annotated[A | B, Field(discriminator="kind")]`), a
    new `kind` drops the keys of the old variant; keys without a `kind` belong to the default variant. Raises
    ConfigError with every unknown key, wrong type and invalid value, and the file or override that contains it.
    """
    sources = _sources(files, trees, overrides)
    tree = _merged(schema, sources)
    _refuse_harmful(tree, "")
    try:
        # Strict validation of JSON accepts lists for tuples; strict validation of Python objects does not.
        made = _adapter(schema).validate_json(json.dumps(_with_defaults(schema, _with_kinds(tree, [schema]))))
    except pydantic.ValidationError as error:
        lines = sorted({_explain_error(schema, problem, sources) for problem in error.errors()})
        raise ConfigError("\n  ".join(lines)) from error
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        labels = ", ".join(source.label for source in sources)
        raise ConfigError(f"{labels}: {error}; use plain numbers, text, lists and mappings") from error
    return made


def _refuse_harmful(value: Any, where: str) -> None:
    """Raises ConfigError for a URL with a user or password, which the run's files and logs would expose, and for an
    integer of more than 64 bits. `where`: dotted name of the value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_harmful(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _refuse_harmful(inner, f"{where}[{number}]")
    elif isinstance(value, str) and without_passwords(value) != value:
        raise ConfigError(
            f"{where} = {without_passwords(value)}: a user or password in a URL would stand in the run's files, which "
            "others read; take it out, and give the secret by a variable of the environment or a file"
        )
    elif type(value) is int and abs(value) > MAX_INT:
        # Python refuses to convert huge integers to base 10.
        told = str(value) if abs(value) < 10**40 else f"{value:#x}"[:40] + "..."
        raise ConfigError(f"{where} = {told}: give a number of at most 64 bits")


@functools.cache
def _adapter(schema: type[Any]) -> pydantic.TypeAdapter[Any]:
    """Returns the validator of a schema. The validator is cached because it is slow to build; forked ranks inherit the
    cache."""
    return pydantic.TypeAdapter(schema)


def tree_of(settings: Any) -> dict[str, Any]:
    """Converts a dataclass of settings, such as a whole config, to nested dicts and lists of JSON values."""
    return _adapter(type(settings)).dump_python(settings, mode="json")


def dump(settings: Any) -> str:
    """Converts a dataclass of settings, such as a whole config, to YAML. `load` of the YAML gives an equal value."""
    return dump_tree(tree_of(settings))


def dump_tree(tree: Mapping[str, Any]) -> str:
    """Converts nested mappings of plain values to YAML. Raises ConfigError for a value that YAML cannot represent."""
    try:
        return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"settings cannot be written as YAML: {error}; use numbers, text, lists and mappings"
        ) from error


def read_tree(
    schema: Any, files: Sequence[Path] = (), overrides: Sequence[str] = (),
    *, trees: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Returns the settings of YAML files, `trees` and overrides, merged as in `load`, without defaults and without
    validation. Raises ConfigError for a file or an override that cannot be parsed."""
    return _merged(schema, _sources(files, trees, overrides))


def read_keys(files: Sequence[Path]) -> set[str]:
    """Returns the top-level keys of YAML files and of their base files."""
    return {key for source in _sources(files, (), ()) for key in source.tree}


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file, with the scalar rules of configs. Raises ConfigError if it cannot be read."""
    try:
        return parse(_text(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _sources(
    files: Sequence[Path], trees: Sequence[tuple[str, Mapping[str, Any]]], overrides: Sequence[str]
) -> list[_Source]:  # fmt: skip
    """Returns the settings of all files, trees and overrides, in order of increasing precedence."""
    found: list[_Source] = []
    for file in files:
        _read(Path(file), (), found)
    return [*found, *(_Source(name, dict(tree)) for name, tree in trees), *(_override(text) for text in overrides)]


def _merged(schema: Any, sources: Sequence[_Source]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for source in sources:
        tree = _merge(tree, source.tree, [schema], None)
    return tree


def _text(path: Path) -> str:
    """Returns the text of a YAML file. Raises ConfigError if the file is too large, OSError if it cannot be read, and
    UnicodeDecodeError if it is not UTF-8."""
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes: a config has {MAX_BYTES} at most")
    return path.read_text(encoding="utf-8")


def _read(file: Path, seen: tuple[Path, ...], out: list[_Source]) -> None:
    """Loads the file's bases, then the file, and appends all of them to `out`. `seen`: the chain of files whose `base`
    led to this file, to detect cycles."""
    path = file.resolve()
    if path in seen:
        raise ConfigError(
            f"{file}: base files form a circle: {' -> '.join(p.name for p in (*seen, path))}; remove one `base`"
        )
    if not file.is_file():
        named_by = f" ({seen[-1]} names it as its base)" if seen else ""
        raise ConfigError(f"no such config file: {file}{named_by}")
    try:
        tree = parse(_text(file), str(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}; is it a YAML file?") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a config is a mapping of keys, not {type(tree).__name__}")
    named = tree.pop("base", None)
    bases = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(base, str) and base.isprintable() for base in bases):
        raise ConfigError(f"{file}: base = {named!r}: give a file name, relative to this file, or a list of them")
    for base in bases:
        _read(file.parent / base, (*seen, path), out)
    out.append(_Source(str(file), tree))
    if len(out) > MAX_FILES:
        raise ConfigError(
            f"{file}: the config is made of more than {MAX_FILES} files, each counted as often as it is named"
        )


def _override(text: str) -> _Source:
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")) or key.count(".") >= MAX_DEPTH:
        raise ConfigError(f"override {text!r}: it has the form a.b=value")
    tree: Any = parse(value, f"override {text!r}")
    for part in reversed(key.split(".")):
        tree = {part.strip(): tree}
    return _Source(f"override {text!r}", tree)


def parse(text: str, label: str) -> Any:
    """Returns the value of a YAML text. Raises ConfigError if the text is invalid, too large or too deeply nested.
    `label`: name of the text for the message."""
    try:
        loader = _Loader(text)
        loader.name = label
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{label[:200]} is not YAML: {error}; quote text with special characters") from error


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], kinds: Sequence[Any], default_kind: Any) -> dict[str, Any]:
    """Returns `old` recursively updated with `new`.

    `kinds`: the types that this mapping may have. `default_kind`: the variant of a union if the mapping has no `kind`.
    """
    if "kind" in new and default_kind is not None and new["kind"] != old.get("kind", default_kind):
        old = {}
    out = dict(old)
    for key, value in new.items():
        if isinstance(value, Mapping):
            before = out.get(key)
            out[key] = _merge(
                before if isinstance(before, Mapping) else {}, value, _inside(kinds, key), _default_kind(kinds, key)
            )
        else:
            out[key] = value
    return out


def _with_kinds(tree: Mapping[str, Any], kinds: Sequence[Any]) -> dict[str, Any]:
    """Returns `tree` with the `kind` of the default variant added to every union that is given without a `kind`."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            default = _default_kind(kinds, key)
            value = _with_kinds(value if default is None else {"kind": default, **value}, _inside(kinds, key))
        out[key] = value
    return out


def _with_defaults(schema: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `tree` with the missing keys of each section filled from the schema's default instance of the section.

    The default instance may differ from the defaults of the section's class, e.g. in SFT's learning rate.
    """
    out = dict(tree)
    for field in dataclasses.fields(schema):
        given = out.get(field.name)
        if not isinstance(given, Mapping) or field.default_factory is dataclasses.MISSING:
            continue
        made = field.default_factory()
        if dataclasses.is_dataclass(made) and given.get("kind", _tag(type(made))) == _tag(type(made)):
            whole = pydantic.TypeAdapter(type(made)).dump_python(made, mode="json")
            out[field.name] = _over(whole, given)
    return out


def _over(whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    out = {**whole, **given}
    for key, value in given.items():
        before = whole.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            out[key] = _over(before, value)
    return out


def _explain_error(schema: Any, problem: Any, sources: Sequence[_Source]) -> str:
    place, kinds = _locate(schema, [str(part) for part in problem["loc"]])
    name = ".".join(place) or "(whole config)"
    said = f"{_origin(place, sources)}: {name}"
    match problem["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            known = [f.name for kind in kinds if dataclasses.is_dataclass(kind) for f in dataclasses.fields(kind)]
            close = difflib.get_close_matches(place[-1], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
            return f"{said}: unknown key; {hint}"
        case "missing" | "missing_argument":
            return f"{said}: missing; it has no default, so give it in a file or as {name}=..."
        case "value_error":
            # The error message was raised by a __post_init__, and may begin with the name of the config section that
            # was checked.
            message = problem["msg"].removeprefix("Value error, ")
            if place and message.startswith(f"{place[-1]}."):
                return f"{_origin(place, sources)}: {'.'.join([*place[:-1], message])}"
            return f"{said}: {message}"
    return f"{said} = {json.dumps(problem['input'], default=str)[:80]}: {_cure(problem)}"


def _cure(problem: Any) -> str:
    match problem["type"]:
        case "int_type" | "int_from_float" | "int_parsing":
            return "give a whole number, without quotes, leading zeros or a decimal point"
        case "float_type" | "float_parsing":
            return "give a number, without quotes"
        case "finite_number":
            return "give a finite number"
        case "bool_type" | "bool_parsing":
            return "give true or false"
        case "string_type":
            return "give text; put it in quotes when it looks like a number or a truth value"
        case "tuple_type":
            return "give a list"
        case "dict_type" | "dataclass_type":
            return "give a mapping of keys"
        case "literal_error":
            return f"choose {problem['ctx']['expected']}"
        case "union_tag_invalid":
            return f"choose a kind among {problem['ctx']['expected_tags']}"
    return problem["msg"].replace("Input should be", "give a value")  # mostly bounds


def _origin(place: Sequence[str], sources: Sequence[_Source]) -> str:
    """Returns the label of the source that sets the key `place`, or the longest prefix of the key that any source sets.
    If several sources set it, returns the label of the last source."""
    best, label = 0, "no file or override sets it"
    for source in sources:
        depth, node = 0, source.tree
        for part in place:
            if not isinstance(node, Mapping) or part not in node:
                break
            depth, node = depth + 1, node[part]
        if depth and depth >= best:
            best, label = depth, source.label
    return label if best or not sources else ", ".join(source.label for source in sources)


def _locate(schema: Any, location: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Converts pydantic's location of an error to (keys as a user writes them, types that may contain the last key).

    The names of a union's variants, which pydantic inserts into the location, are removed.
    """
    place: list[str] = []
    parents: list[Any] = [schema]
    kinds: list[Any] = [schema]
    for part in location:
        variants = [kind for kind in kinds if part in (_tag(kind), _name(kind))]
        if variants and len(kinds) > 1:
            kinds = variants
            continue
        parents, kinds = kinds, _inside(kinds, part)
        place.append(part)
    return place, parents


def _inside(kinds: Sequence[Any], key: str) -> list[Any]:
    """Returns the types that the value of `key` may have in these dataclasses or dicts; [] if the key is unknown."""
    found: list[Any] = []
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            found += _alternatives(hints[key]) if key in hints else []
        elif typing.get_origin(kind) is dict:
            found += _alternatives(typing.get_args(kind)[1])
    return found


def _default_kind(kinds: Sequence[Any], key: str) -> Any:
    """Returns the `kind` of the default value of `key` if the key holds a variant of a union, otherwise None."""
    for kind in kinds:
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            if field.name == key:
                made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                return _tag(type(made))
    return None


def _tag(kind: Any) -> Any:
    """Returns the default of a dataclass's field `kind`, which identifies the variant of a union. Returns None if the
    dataclass has no such field."""
    fields = {f.name: f.default for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    return fields.get("kind")


def _name(kind: Any) -> str | None:
    return kind.__name__ if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


def _alternatives(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [a for arg in typing.get_args(kind) for a in _alternatives(arg)]
    return [kind]
