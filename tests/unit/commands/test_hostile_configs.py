"""Configs that are bombs or nonsense: each is refused at once, by name, in little memory."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext

import pytest

from megatron_rl.commands.settings import load
from megatron_rl.config import files
from megatron_rl.config.base import ConfigError
from megatron_rl.config.schema import Launch

ALIASES = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
)
MERGES = "\n".join(
    ["m0: &m0 {k: 1}", *(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}" for i in range(1, 12))]
)
BOMBS = {
    "aliases": ALIASES,
    "merges": MERGES,
    "itself": "a: &a [*a]",
    "deep": "a: " + "[" * 5_000,
    "deep mapping": "".join(f"{' ' * i}a:\n" for i in range(3000)),
    "number key": "1: {}",
    "null key": "~: {}",
    "list key": "? [a, b]\n: c",
    "truth key": "true: 1",
    "hex": "launch: {nproc: 0x" + "f" * 20_000 + "}",
    "digits": "launch: {nproc: " + "9" * 20_000 + "}",
    "bytes": "run: {name: !!binary aGk=}",
    "object": "run: !!python/object/apply:os.system ['true']",
    "set": "run: !!set {a, b}",
    "stream": "a: 1\n---\nb: 2\n",
    "control": 'run: {name: "a\0b"}',
}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_yaml_is_refused_in_little_memory(tmp_path, name):
    """A file of 600 bytes took 22 GB, and others ended in a RecursionError."""
    (tmp_path / "bomb.yaml").write_text(BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError):
            load([str(tmp_path / "bomb.yaml")], "train")
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_hostile_number_of_keys_takes_no_long(tmp_path):
    """Looking for keys given twice took time by the square of their number."""
    (tmp_path / "keys.yaml").write_text("\n".join(f"key_{i}: 1" for i in range(8_000)))
    assert len(files.read_yaml(tmp_path / "keys.yaml")) == 8_000
    with pytest.raises(ConfigError, match="key_7 is given twice"):
        files.parse("\n".join(f"key_{i % 4_000}: 1" for i in range(4_000)) + "\nkey_7: 2", "text")


def test_hostile_circle_of_bases_that_doubles(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.yaml").write_text(f"base: [{i + 1}.yaml, {i + 1}.yaml]\n")
    (tmp_path / "40.yaml").write_text("run: {seed: 1}\n")
    with pytest.raises(ConfigError, match="more than 100 files"):
        load([str(tmp_path / "0.yaml")], "train")


@pytest.mark.parametrize(
    "text", [".".join("a" * 5000) + "=1", "run.seed=" + "[" * 9000, "run.name=\ud800", "=", "a..b=1"]
)
def test_hostile_overrides_are_refused(text):
    with pytest.raises(ConfigError):
        load([text], "train")


def test_hostile_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "large.yaml").write_bytes(b"#" * (files.MAX_BYTES + 1))
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    for name in ("large.yaml", "latin.yaml", "."):
        with pytest.raises(ConfigError):
            load([str(tmp_path / name)], "train")


@pytest.mark.parametrize("nproc", [1025, 1_000_000, 10**30])
def test_hostile_number_of_ranks_is_refused(nproc):
    """A million processes were about to be started."""
    with pytest.raises(ConfigError, match=r"nproc = \d+: give a (value|number)"):
        files.load(Launch, (), [f"nproc={nproc}"])


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("a: " + "[" * 63 + "]" * 63, ""),
        ("a: " + "[" * 64 + "]" * 64, "values are nested more than 64 deep"),
        ("a: &a [*a]", "an alias lies in what it names"),
        ("a: &a {b: {c: *a}}", "an alias lies in what it names"),
    ],
)
def test_hostile_values_may_be_nested_64_deep_and_not_in_themselves(text, refused, tmp_path):
    (tmp_path / "nested.yaml").write_text(text)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        files.read_yaml(tmp_path / "nested.yaml")


@pytest.mark.parametrize("more", [0, 1])
def test_hostile_config_has_at_most_50000_values_with_its_aliases_written_out(more, tmp_path):
    lists = {"a": ["&a [", ["0"] * 99], "b": ["[", ["*a"] * 498], "c": ["[", ["0"] * (94 + more)]}
    values = 1 + (1 + 1 + 99) + (1 + 1 + 498 * 100) + (1 + 1 + 94 + more)  # the mapping, and its keys and lists
    assert values == files.MAX_VALUES + more
    text = "".join(f"{key}: {begin}{', '.join(items)}]\n" for key, (begin, items) in lists.items())
    (tmp_path / "many.yaml").write_text(text)
    with pytest.raises(ConfigError, match="more than 50000 values") if more else nullcontext():
        files.read_yaml(tmp_path / "many.yaml")
