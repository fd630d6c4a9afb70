"""Loads configs: defaults, YAML files from left to right, and `a.b=c` overrides. Later values override earlier ones.

All problems of a config are reported in one error, each with the value and how to correct it. This module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pydantic
import yaml

from megatron_rl.config.base import UNREADABLE, ConfigError, hint, refuse, refusing, without_passwords
from megatron_rl.config.other_names import named_elsewhere

T = TypeVar("T")
MAX_DEPTH = 64  # maximum nesting depth of values
MAX_VALUES = 50_000  # maximum number of values in one YAML text after its aliases are expanded
MAX_BYTES = 2 << 20  # maximum size of one file
MAX_FILES = 100  # maximum number of files of one config, including files named by `base`
MAX_INT = 2**63 - 1  # maximum absolute value of an integer


# Exceptions for values that JSON or pydantic cannot represent, and for annotations that cannot be resolved
_ODD = (ValueError, RecursionError, TypeError, NameError, pydantic.PydanticUserError)
# {type of a pydantic error: how to correct the value}. Names in braces are replaced by values of the error's context.
_CURES = {
    **dict.fromkeys(
        ("int_type", "int_from_float", "int_parsing"),
        "give a whole number, without quotes, leading zeros or a decimal point",
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "give a number, without quotes"),
    "finite_number": "give a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "give true or false"),
    "string_type": "give text; put it in quotes when it looks like a number or a truth value",
    "tuple_type": "give a list",
    **dict.fromkeys(("dict_type", "dataclass_type"), "give a mapping of keys"),
    "literal_error": "choose {expected}",
    "union_tag_invalid": "choose a kind among {expected_tags}",
}


class _Source(NamedTuple):
    """The settings of one file, tree (nested mapping) or override, and the label by which error messages name it."""

    label: str
    tree: dict[str, Any]


# Patterns of the scalars of YAML 1.2 (int, float, bool). They replace PyYAML's patterns, because PyYAML follows YAML
# 1.1, which parses 1e-6 as text, 12:30 as 750, 010 as 8, `no` as false and 2024-01-01 as a date.
_INT = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$|^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")


class _Loader(yaml.SafeLoader):
    """A safe YAML loader with the scalars of YAML 1.2 (1e-6 is a number). Keys that are not text, duplicate keys, and
    values that are too deeply nested or too numerous after aliases are expanded are errors."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Rejects documents that are nested so deeply that this recursive method would overflow the stack. The method
        # `count` later checks the exact limit MAX_DEPTH.
        if len(self.states) > 2 * MAX_DEPTH:
            raise ConfigError(f"{self.name}: values are nested more than {MAX_DEPTH} deep")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
        where = f"{self.name}, line {node.start_mark.line + 1}"
        refuse(
            *(f"{where}: the key {str(key)[:80]} is no text: put it in quotes" for key in keys if type(key) is not str)
        )
        if twice := sorted(key for key, count in Counter(keys).items() if count > 1):
            raise ConfigError(f"{where}: {', '.join(twice)} is given twice; keep one")
        return super().construct_mapping(node, deep=deep)

    def count(self, node: yaml.Node, counts: dict[int, int], depth: int = 0) -> int:
        """Returns the number of values in a node with its aliases expanded. Raises ConfigError for too many or too
        deeply nested values. `counts`: {id: count} of the nodes that were counted already."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in counts:
            if depth >= MAX_DEPTH:
                raise ConfigError(
                    f"{self.name}: values are nested more than {MAX_DEPTH} deep, or an alias lies in what it names"
                )
            pairs = [(part,) for part in node.value] if isinstance(node, yaml.SequenceNode) else node.value
            counts[id(node)] = 1 + sum(self.count(part, counts, depth + 1) for pair in pairs for part in pair)
            if counts[id(node)] > MAX_VALUES:
                raise ConfigError(
                    f"{self.name}: more than {MAX_VALUES} values, with aliases written out: a config is small"
                )
        return counts[id(node)]


class _Dumper(yaml.SafeDumper):
    """A safe YAML dumper that quotes every text which YAML 1.1 or 1.2 would parse as a number, boolean or date."""


def _resolvers() -> dict[str, list[Any]]:
    """Returns the table {first character of a scalar: [(tag, pattern)]} of yaml.SafeLoader, changed from YAML 1.1 to
    YAML 1.2: with other patterns of int, float and bool, and without dates."""
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


_Loader.yaml_implicit_resolvers = _resolvers()
_QUOTED = re.compile("|".join(pattern.pattern for pattern in (_INT, _FLOAT, _BOOL)))
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if _QUOTED.match(text) else None),
)


def load(
    schema: type[T], files: Sequence[Path] = (), overrides: Sequence[str] = (),
    *, trees: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> T:  # fmt: skip
    """Returns a validated instance of `schema` from the schema's defaults, YAML files, `trees` and `a.b=c` overrides.

    `trees`: pairs (label, settings), in which `settings` are nested mappings as in a file; error messages use `label`.

    If a file has the key `base` (a path relative to the file, or a list of paths), the base files are loaded before the
    file. Mappings are merged key by key. In a union of dataclasses (`Annotated[A | B, Field(discriminator="kind")]`), a
    new `kind` drops the keys of the old variant; keys without a `kind` belong to the first variant. Raises ConfigError
    with every unknown key, wrong type and invalid value, and the file or override that contains it.
    """
    sources = _sources(files, trees, overrides)
    labels = ", ".join(source.label for source in sources)

    def explained(error: Any) -> str:
        return "\n  ".join(sorted({line for e in error.errors() for line in _explain_error(schema, e, sources)}))

    with (
        refusing(lambda error: f"{labels}: {error}; use plain numbers, text, lists and mappings", *_ODD),
        refusing(explained, pydantic.ValidationError),
    ):
        tree = _merged(schema, [_Source("", _defaults(schema, sources)), *sources])
        refuse(*_harmful(tree, ""))
        # Validates JSON, because strict validation accepts lists for tuples in JSON, but not in Python objects.
        return _adapter(schema).validate_json(json.dumps(tree), strict=True, extra="forbid")


def _defaults(schema: Any, sources: Sequence[_Source]) -> dict[str, Any]:
    """Returns {name of a section: its default settings} for each section in which `sources` set a key. The defaults are
    those that the schema declares for the section, which may differ from the defaults of the section's class. For
    example, SftConfig declares another learning rate than the class Optimizer."""
    named = {key for source in sources for key, value in source.tree.items() if isinstance(value, Mapping)}
    defaults = [
        (f.name, f.default_factory())
        for f in dataclasses.fields(schema)
        if f.name in named and callable(f.default_factory)
    ]
    return {name: tree_of(section) for name, section in defaults if dataclasses.is_dataclass(section)}


def _harmful(value: Any, where: str) -> Iterator[str]:
    """Yields an error message for a URL with a user or password, which the run's files and logs would expose, and for
    an integer of more than 64 bits. `where`: dotted name of the value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _harmful(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _harmful(inner, f"{where}[{number}]")
    elif isinstance(value, str) and without_passwords(value) != value:
        yield (
            f"{where} = {without_passwords(value)}: a user or password in a URL would stand in the run's files, which "
            "others read; take it out, and give the secret by a variable of the environment or a file"
        )
    elif type(value) is int and abs(value) > MAX_INT:
        # Shows huge integers in hexadecimal, because Python refuses to convert them to decimal.
        shown = str(value) if abs(value) < 10**40 else f"{value:#x}"[:40] + "..."
        yield f"{where} = {shown}: give a number of at most 64 bits"


@functools.cache
def _adapter(schema: type[Any]) -> pydantic.TypeAdapter[Any]:
    """Returns the validator of a schema. The validator is cached because it is slow to build; forked ranks inherit the
    cache."""
    return pydantic.TypeAdapter(schema)


def tree_of(settings: Any) -> dict[str, Any]:
    """Converts a dataclass of settings, such as a whole config, to nested dicts and lists of JSON values."""
    return _adapter(type(settings)).dump_python(settings, mode="json")


def dump(settings: Any) -> str:
    """Converts a dataclass of settings, such as a whole config, to YAML. `load` converts the YAML to an equal
    dataclass."""
    return dump_tree(tree_of(settings))


def dump_tree(tree: Mapping[str, Any]) -> str:
    """Converts nested mappings of plain values to YAML. Raises ConfigError for a value that YAML cannot represent."""
    cure = "use numbers, text, lists and mappings"
    with refusing(lambda error: f"settings cannot be written as YAML: {error}; {cure}", yaml.YAMLError):
        return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_tree(
    schema: Any, files: Sequence[Path] = (), overrides: Sequence[str] = (),
    *, trees: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Returns the settings of YAML files, `trees` and overrides, merged as in `load`, without defaults and without
    validation. Raises ConfigError for a file or an override that cannot be parsed."""
    return _merged(schema, _sources(files, trees, overrides))


def read_top(files: Sequence[Path]) -> dict[str, Any]:
    """Returns {top-level key: value in the last file that has the key} of YAML files and of their base files."""
    return {key: value for source in _sources(files, (), ()) for key, value in source.tree.items()}


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file, parsed as configs are (YAML 1.2 scalars). Raises ConfigError if it cannot be
    read."""
    with refusing(lambda error: f"{path} cannot be read: {error}; is it a YAML file?", *UNREADABLE):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no regular file: give a YAML file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes: a config has {MAX_BYTES} at most")
        return parse(path.read_text(encoding="utf-8"), str(path))


def _sources(
    files: Sequence[Path], trees: Sequence[tuple[str, Mapping[str, Any]]], overrides: Sequence[str]
) -> list[_Source]:  # fmt: skip
    """Returns the settings of all files, trees and overrides, in order of increasing precedence."""
    sources: list[_Source] = []
    for file in files:
        _read(Path(file), (), sources)
    sources += [_Source(name, dict(tree)) for name, tree in trees]
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")) or key.count(".") >= MAX_DEPTH:
            raise ConfigError(f"override {text!r}: it has the form a.b=value")
        tree: Any = parse(value, f"override {text!r}")
        for part in reversed(key.split(".")):
            tree = {part.strip(): tree}
        sources.append(_Source(f"override {text!r}", tree))
    return sources


def _merged(schema: Any, sources: Sequence[_Source]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for source in sources:
        tree = _merge(tree, source.tree, [schema])
    return tree


def _read(file: Path, seen: tuple[Path, ...], sources: list[_Source]) -> None:
    """Loads a config file and appends its settings to `sources`, after the settings of the files that its key `base`
    names. `seen`: the chain of files whose `base` led to this file; used to detect cycles."""
    path = file.resolve()
    if path in seen:
        circle = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(f"{file}: base files form a circle: {circle}; remove one `base`")
    if not file.is_file():
        raise ConfigError(f"no such config file: {file}" + (f" ({seen[-1]} names it as its base)" if seen else ""))
    tree = read_yaml(file)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a config is a mapping of keys, not {type(tree).__name__}")
    named = tree.pop("base", None)
    bases = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(base, str) and base.isprintable() for base in bases):
        raise ConfigError(f"{file}: base = {named!r}: give a file name, relative to this file, or a list of them")
    for base in bases:
        _read(file.parent / base, (*seen, path), sources)
    sources.append(_Source(str(file), tree))
    if len(sources) > MAX_FILES:
        raise ConfigError(
            f"{file}: the config is made of more than {MAX_FILES} files, each counted as often as it is named"
        )


def parse(text: str, label: str) -> Any:
    """Returns the value of a YAML text. Raises ConfigError if the text is invalid, too large or too deeply nested.
    `label`: name of the text for the message."""
    cure = "quote text with special characters"
    with refusing(lambda error: f"{label[:200]} is not YAML: {error}; {cure}", yaml.YAMLError, *UNREADABLE):
        loader = _Loader(text)
        loader.name = label
        root = loader.get_single_node()
        if root is None:
            return None
        loader.count(root, {})
        return loader.construct_document(root)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], kinds: Sequence[Any]) -> dict[str, Any]:
    """Returns `old` recursively updated with `new`. If `new` selects another variant of a union by its key `kind`, the
    values of `old` are dropped. `kinds`: the types in the schema that the mapping may represent."""
    tags = [tag for kind in kinds if (tag := _tag(kind)) is not None]
    old_kind = old.get("kind", tags[0]) if len(tags) > 1 else None
    merged = dict(old) if old_kind is None or new.get("kind", old_kind) == old_kind else {}
    for key, value in new.items():
        if isinstance(value, Mapping):
            old_value = merged.get(key)
            value = _merge(old_value if isinstance(old_value, Mapping) else {}, value, _inside(kinds, key))
        merged[key] = value
    return merged


def _explain_error(schema: Any, problem: Any, sources: Sequence[_Source]) -> Iterator[str]:
    """Yields error messages that say where a pydantic error is, what it is, and how to correct it."""
    place, kinds = _locate(schema, [str(part) for part in problem["loc"]])
    name, origin = ".".join(place) or "(whole config)", _origin(place, sources)
    match problem["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            fields = {
                f.name: typing.get_type_hints(kind)[f.name]
                for kind in kinds
                if dataclasses.is_dataclass(kind)
                for f in dataclasses.fields(kind)
                if f.init
            }
            cure = hint(place[-1], fields, f"known here: {', '.join(fields)}")
            if inside := [key for key, kind in fields.items() if _has_field(kind, place[-1])]:
                cure = f"set {'.'.join([*place[:-1], inside[0], 'NAME', place[-1]])} for each NAME in {inside[0]}"
            for key, words in [*named_elsewhere(name, problem["input"])] or [(name, cure)]:
                yield f"{origin}: {key}: unknown key; {words}"
        case "missing" | "missing_argument":
            yield f"{origin}: {name}: missing; it has no default, so give it"
        case "value_error":
            # A message of a section's method `problems` may begin with the section's name, which is not repeated then.
            for message in problem["msg"].removeprefix("Value error, ").split("\n  "):
                has_name = place and message.startswith(f"{place[-1]}.")
                yield f"{origin}: {'.'.join([*place[:-1], message]) if has_name or not place else f'{name}: {message}'}"
        case kind:
            cure = _CURES.get(kind, "").format(**problem.get("ctx", {}))
            cure = cure or problem["msg"].replace("Input should be", "give a value")  # mostly bounds
            yield f"{origin}: {name} = {json.dumps(problem['input'], default=str)[:80]}: {cure}"


def _has_field(kind: Any, key: str) -> bool:
    """Returns whether a type is a mapping of names to sections that have the field `key`."""
    values = typing.get_args(kind)[1:] if typing.get_origin(kind) is dict else ()
    return any(
        dataclasses.is_dataclass(value) and key in {f.name for f in dataclasses.fields(value)} for value in values
    )


def _origin(place: Sequence[str], sources: Sequence[_Source]) -> str:
    """Returns the label of the last source that sets the key `place`. If no source sets the key, returns the label of
    the last source that sets the longest prefix of the key."""
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
    """Converts the location in a pydantic error to a pair: the keys as a user writes them, and the types that the
    section with the last key may have. Removes the names of a union's variants, which pydantic inserts into locations.
    """
    place: list[str] = []
    parents: list[Any] = [schema]
    kinds: list[Any] = [schema]
    for part in location:
        if part.startswith("("):  # the tag of a variant
            hints = [typing.get_type_hints(kind, include_extras=True) for kind in parents if isinstance(kind, type)]
            kinds = [kind for fields in hints for kind in _tagged(fields.get(place[-1]), part)] or kinds
            continue
        variants = [kind for kind in kinds if part == _tag(kind)]
        if variants and len(kinds) > 1:
            kinds = variants
            continue
        parents, kinds = kinds, _inside(kinds, part)
        place.append(part)
    return place, parents


def _tagged(hint: Any, tag: str) -> list[Any]:
    """Returns the types in a union that have the pydantic.Tag `tag`. `hint`: an annotation with its metadata."""
    kinds = []
    for part in typing.get_args(hint):
        tags = [mark.tag for mark in typing.get_args(part) if isinstance(mark, pydantic.Tag)]
        kinds += [typing.get_args(part)[0]] if tag in tags else _tagged(part, tag)
    return kinds


def _inside(kinds: Sequence[Any], key: str) -> list[Any]:
    """Returns the types that the value of `key` may have inside a value of one of the types `kinds` (dataclasses, dicts
    or tuples); [] if none of these types has the key."""
    hints_of_key: list[Any] = []
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and key in (hints := typing.get_type_hints(kind)):
            hints_of_key.append(hints[key])
        elif typing.get_origin(kind) is dict:
            hints_of_key.append(typing.get_args(kind)[1])
        elif typing.get_origin(kind) is tuple:
            hints_of_key.append(typing.get_args(kind)[0])
    unions = (typing.Union, types.UnionType)
    return [
        variant
        for kind in hints_of_key
        for variant in (typing.get_args(kind) if typing.get_origin(kind) in unions else [kind])
    ]


def _tag(kind: Any) -> Any:
    """Returns the name by which a config selects a dataclass among the variants of a union: the default of its field
    `kind`. Returns None if the type has no field `kind`."""
    fields = {f.name: f.default for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    return fields.get("kind")
