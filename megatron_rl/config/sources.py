"""Finds the files that a run of a config reads: plug-ins and the modules that they import, prompts, templates, data,
models, and the code of this package.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import pickletools
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.plugins import is_target, look_here, module_file

PACKAGE = Path(__file__).parents[1]
# Subpackages that only start, watch and describe runs. A change in these subpackages cannot change a rollout.
WATCHING = ("api", "commands", "conversion", "jobs", "planning", "run")
CODE = (".py", ".txt", ".jinja")
MODULE = "module "  # prefix of the keys of Python modules in the result of `sources`
# Sections and settings of a config that are not searched for names of input files.
NOT_READ = ("run", "output", "engine", "launch", "job", "sinks", "debug", "data_dir")
MODELS = ("path", "tokenizer", "junior")  # settings that name directories of models, tokenizers and adapters
READ = (  # suffixes of file names; only files with these suffixes are read in a model directory
    "config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", ".index.json",
    "merges.txt", "vocab.txt", ".jinja", ".model", ".tiktoken", ".safetensors",
)  # fmt: skip
_LONGEST_PATH = 4096  # maximum length of a path; a longer text is not a file name


def sources(tree: Any) -> dict[str, Path]:
    """Returns {name: file} of the files that a run of a config reads. `tree`: the config as JSON values.

    A file whose path is the value of a setting (data, a prompt, a chat template, a corpus) has the setting's dotted
    name. Files of models and adapters have the name SETTING/FILE. The user's Python modules, which are the modules of
    plug-ins and of pickled functions and the modules that they import, have the name "module NAME". Modules of the
    standard library, of this package, and of other installed packages are not included. Files that a plug-in's code
    opens, and directories that a plug-in's argument names, are not included. Only the packages that contain plug-ins
    are imported.
    """
    texts = {setting: text for setting, text in _texts(tree, "") if setting.partition(".")[0] not in NOT_READ}
    files = {name: file for setting, text in texts.items() for name, file in _files(setting, text)}
    named = [name for setting, file in files.items() if setting.endswith(".pickled") for name in _names_in(file)]
    targets = {text.partition(":")[0] for text in texts.values() if is_target(text)}
    return files | {f"{MODULE}{name}": file for name, file in _modules(targets, {*named})}


def is_code(name: str) -> bool:
    """Returns whether the name of a source (a key of `sources`) belongs to a Python module, not to data."""
    return name.startswith(MODULE)


def own_code() -> list[tuple[str, bytes]]:
    """Returns [(path, contents)] of the files with this package's code and prompts, except the subpackages in WATCHING,
    which cannot change a rollout."""
    files = sorted(file for file in PACKAGE.rglob("*") if file.suffix in CODE)
    named = [(file.relative_to(PACKAGE), file) for file in files]
    return [(str(path), file.read_bytes()) for path, file in named if path.parts[0] not in WATCHING]


def _texts(tree: Any, setting: str) -> Iterator[tuple[str, str]]:
    """Yields (setting, text) for each text in a config's tree, such as ("data.path", "rows.jsonl")."""
    if isinstance(tree, str):
        yield setting, tree
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, part in parts:
        yield from _texts(part, f"{setting}.{name}" if setting else str(name))


def _files(setting: str, text: str) -> Iterator[tuple[str, Path]]:
    """Yields (name, file) for the file at the path `text`, or for the model files in the directory `text`. `setting`:
    dotted name of the setting whose value is `text`. Yields nothing if `text` is not such a path."""
    place = Path(text)
    if not 0 < len(text) <= _LONGEST_PATH or "\n" in text or "\0" in text:
        return
    if os.path.isfile(place):
        yield (MODULE if place.suffix == ".py" else "") + setting, place
    elif os.path.isdir(place) and setting.rpartition(".")[2] in MODELS:
        for file in sorted(place.iterdir()):
            if file.name.endswith(READ) and not file.name.startswith("."):
                yield f"{setting}/{file.name}", file


def _names_in(pickled: Path) -> set[str]:
    """Returns the texts in a pickled function that may be names of modules. Nothing is unpickled."""
    texts: set[str] = set()
    with contextlib.suppress(ValueError):  # ignored, because unpickling the file later reports the error
        texts |= {text for _, text, _ in pickletools.genops(pickled.read_bytes()) if isinstance(text, str)}
    return {text for text in texts if all(part.isidentifier() for part in text.split("."))}


def _modules(targets: set[str], others: set[str]) -> Iterator[tuple[str, Path]]:
    """Yields (name, file) of the user's modules, each module once: the modules named in `targets` and `others`, and the
    user's modules that they import.

    `targets`: names of the plug-ins' modules. `others`: further names, of which some may be names of modules.
    """
    look_here()
    tops = {target.partition(".")[0] for target in targets}
    waiting = [(name, module_file(name)) for name in sorted(targets)]
    waiting += [(name, _own_file(name, tops)) for name in sorted(others - targets)]
    seen = targets | others
    while waiting:
        name, file = waiting.pop()
        if file is None or not file.is_file() or PACKAGE in file.parents:
            continue
        yield name, file
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _imports(file.read_bytes(), package) - seen:
            seen.add(imported)
            waiting.append((imported, _own_file(imported, tops)))


def _imports(source: bytes, package: str) -> set[str]:
    """Returns the names of the modules that a source text may import, and of their parent packages. Returns an empty
    set if the text is not valid Python.

    `from a import b` may import a.b. `package`: the package against which relative imports are resolved.
    """
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            modules |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    packages = {name.rsplit(".", count)[0] for name in modules for count in range(1, name.count(".") + 1)}
    return {name for name in modules | packages if name}


def _own_file(name: str, tops: set[str]) -> Path | None:
    """Returns the file of a user's module. Returns None for a module of the standard library, of this package, or of an
    installed package that is not among the plug-ins' packages (`tops`). Nothing is imported."""
    top, *rest = name.split(".")
    if top == PACKAGE.name:
        return None
    try:
        spec = first = importlib.util.find_spec(top)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            # Searches for the last part of the module's name only. A search for the full name would have to import the
            # parent package if the parent is a namespace package.
            spec = importlib.machinery.PathFinder.find_spec(part, [*spec.submodule_search_locations])
    except (ImportError, ValueError):
        return None
    if first is None or spec is None or not spec.has_location or not (spec.origin or "").endswith(".py"):
        return None
    origin, [place, *_] = str(spec.origin), first.submodule_search_locations or [str(first.origin)]
    installed = {"site-packages", "dist-packages"} & set(Path(origin).parts) or top in _installed(Path(place).parent)
    libraries = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib"))
    if (installed and top not in tops) or (not installed and origin.startswith(libraries)):
        return None
    return Path(origin)


@functools.cache
def _installed(folder: Path) -> frozenset[str]:
    """Returns the top-level names of the packages that pip installed into a folder, e.g. by `pip install --target`."""
    records = [file.read_text(encoding="utf-8").splitlines() for file in folder.glob("*.dist-info/RECORD")]
    return frozenset(re.split("[/,]", row)[0].removesuffix(".py") for rows in records for row in rows)
