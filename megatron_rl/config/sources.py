"""Finds the files that decide what the rollouts of a config are: plug-ins with what they import, prompts, templates,
data, tokenizers, and this package's own code. Nothing is imported for it but the packages that plug-ins lie in.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.plugins import is_target, look_here, module_file

PACKAGE = Path(__file__).parents[1]
# Rooms of this package that only start, watch and describe runs: a change there makes no rollout another one.
WATCHING = ("api", "commands", "conversion", "jobs", "planning", "run")
CODE = (".py", ".txt", ".jinja")
TOKENIZER = ("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WHOLE_BYTES = 16 << 20  # files up to this size count whole; of larger ones, data sets, size, beginning and end
END_BYTES = 1 << 20
_LONGEST_PATH = 4096  # a longer text names no file


def digest(tree: Any) -> str:
    """Returns a text that differs where a file does that the rollouts of a config depend on. `tree`: the config as
    JSON values."""
    whole = hashlib.sha256()
    for name, content in (*sorted(set(sources(tree))), *own_code()):
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def sources(tree: Any) -> Iterator[tuple[str, bytes]]:
    """Yields (name, contents) of the files that the strings in a config's JSON tree name.

    These are modules of plug-ins, and the modules that they import in turn as far as they lie outside the standard
    library, this package, and other packages that were installed; any file, such as a prompt, a chat template or data;
    and a model directory's tokenizer. A file that is opened by its name inside a plug-in is not found.
    """
    texts = set(_texts(tree))
    targets = {text.partition(":")[0] for text in texts if is_target(text)}
    yield from _modules(targets)
    for text in texts:
        place = Path(text)
        if not 0 < len(text) <= _LONGEST_PATH or "\n" in text or "\0" in text:
            continue
        for file in (place, *(place / name for name in TOKENIZER)):
            if os.path.isfile(file):
                yield str(file), _content(file)


def own_code() -> list[tuple[str, bytes]]:
    """Returns (path, contents) of this package's code and prompts, without the rooms that no rollout depends on."""
    files = sorted(file for file in PACKAGE.rglob("*") if file.suffix in CODE)
    named = [(file.relative_to(PACKAGE), file) for file in files]
    return [(str(path), file.read_bytes()) for path, file in named if path.parts[0] not in WATCHING]


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        tree = [*tree.values()]
    if isinstance(tree, list):
        for part in tree:
            yield from _texts(part)
    elif isinstance(tree, str):
        yield tree


def _content(file: Path) -> bytes:
    size = file.stat().st_size
    if size <= WHOLE_BYTES:
        return file.read_bytes()
    with file.open("rb") as opened:
        first = opened.read(END_BYTES)
        opened.seek(-END_BYTES, os.SEEK_END)
        return f"{size}\n".encode() + first + opened.read()


def _modules(targets: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yields (module, contents) of plug-ins' modules and of what they import, each once."""
    look_here()
    tops = {target.partition(".")[0] for target in targets}
    waiting = [(name, module_file(name)) for name in sorted(targets)]
    seen = set(targets)
    while waiting:
        name, file = waiting.pop()
        if file is None or not file.is_file():
            continue
        content = file.read_bytes()
        yield name, content
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _imports(content, package) - seen:
            seen.add(imported)
            waiting.append((imported, _own_file(imported, tops)))


def _imports(source: bytes, package: str) -> set[str]:
    """Returns the modules that a source may import, with the packages that they lie in; none of one that is no Python.

    `from a import b` may import a.b. `package`: the one that relative imports count from.
    """
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    packages = {name.rsplit(".", count)[0] for name in found for count in range(1, name.count(".") + 1)}
    return {name for name in found | packages if name}


def _own_file(name: str, tops: set[str]) -> Path | None:
    """Returns the file of a module that belongs to the user: neither Python's, nor this package's, nor one of another
    installed package than those of the plug-ins (`tops`). Nothing is imported."""
    top, *rest = name.split(".")
    if top == PACKAGE.name:
        return None
    try:
        spec = importlib.util.find_spec(top)
        full = top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            full = f"{full}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(full, [*spec.submodule_search_locations])
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    installed = {"site-packages", "dist-packages"} & set(Path(spec.origin).parts)
    libraries = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib"))
    if (installed and top not in tops) or (not installed and spec.origin.startswith(libraries)):
        return None
    return Path(spec.origin)
