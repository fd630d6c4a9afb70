"""Prints figures about the size and the structure of the code, each with its bar.

python tools/house.py                 # a table: figure, value, bar, aim
python tools/house.py --check         # exit status 1 when a figure is above its bar, as `make check` runs it
python tools/house.py --list FIGURE   # the places that make up one figure, such as "single-use helpers"

Only files that git tracks, or would track, are counted.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_rl"
WHOLE_CONFIG = re.compile(r"\b(Train|Sft|Eval|Generate)Config\b")
# In this package a parameter `config` without an annotation is Megatron-core's TransformerConfig.
CORE_CONFIGS = f"{PACKAGE}/megatron/"
LOOP = f"{PACKAGE}/training/loop.py"
SHORT, LONG, FILE = 8, 50, 500  # lines of a helper, of a function, of a file
# names of variables and parameters that do not say what their value is
GENERIC = re.compile(
    "after|asked|before|each|found|given|here|known|left|made|one|other|out|own|said|there|told|wanted|whole"
)
# functions and classes that create an engine of a role
ENGINES = {"DataParallelEngine", "Pool", "given", "open_endpoint"}
NAMED_IN: dict[str, tuple[str, ...]] = {  # figure -> the folders whose names it counts
    "generic names, %": (f"{PACKAGE}/",),
    "generic names of helpers, %": ("tests/helpers/", "tools/", "benchmarks/"),
}
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
BARS: dict[str, tuple[float, float]] = {  # figure -> (today's bar, the aim); lower the bar when a figure falls
    "lines of the core": (38700, 36000),
    "tokens of the core": (407000, 385000),
    "lines of the leaves": (11250, 10700),
    "`fmt: skip`": (250, 200),
    "generic names, %": (1.5, 1.5),
    "generic names of helpers, %": (1.5, 1.5),
    "whole-specification signatures": (12, 12),
    "modules that import RunSpec": (15, 15),
    "loose modules": (4, 4),
    "file exceptions of layers": (0, 0),
    "two-way package imports": (0, 0),
    "whole-config signatures": (10, 10),
    "single-use helpers": (100, 100),
    "raise per 1,000 lines": (12, 12),
    "openers of engines": (1, 1),
    "functions over 50 lines": (0, 0),
    "stages of the loop over 30 lines": (0, 0),
    "files over 500 lines": (0, 0),
    "Makefile targets": (25, 25),
    "CHANGELOG lines": (70, 70),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A parsed Python file: its path relative to the repository, its text, and all nodes of its syntax tree."""

    path: str
    text: str
    nodes: list[ast.AST]

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))


def tracked() -> list[str]:
    """Returns the paths of all files in the tree that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(path for path in set(listed) if path and (ROOT / path).is_file())


def code_lines(source: Source) -> int:
    """Counts the lines of a Python file without blank lines, comments and docstrings."""
    counted: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in BLANK:
            counted |= set(range(token.start[0], token.end[0] + 1))
    for node in source.nodes:
        documented = isinstance(node, ast.Module | ast.ClassDef | Function)
        if documented and ast.get_docstring(node, clean=False) is not None:
            counted -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(counted)


def lines_of_code(package: list[Source], paths: list[str]) -> list[str]:
    """Returns the path of each code line of the package's Python, JavaScript and CSS, vendored files not counted."""
    paths_of_lines = [source.path for source in package for _ in range(code_lines(source))]
    for path in paths:
        if path.startswith(f"{PACKAGE}/") and path.endswith((".js", ".css")) and ".min." not in path:
            lines = [line.strip() for line in (ROOT / path).read_text().splitlines()]
            paths_of_lines += [path for line in lines if line and not line.startswith(("//", "/*", "*"))]
    return paths_of_lines


def tokens_of_code(package: list[Source]) -> list[str]:
    """Returns the path of each token of the package's Python, without comments, docstrings and ends of lines."""
    counted = []
    for source in package:
        documented = [n for n in source.nodes if isinstance(n, ast.Module | ast.ClassDef | Function)]
        docstrings = {n.body[0].lineno for n in documented if ast.get_docstring(n, clean=False) is not None}
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type not in BLANK and not (token.type == tokenize.STRING and token.start[0] in docstrings):
                counted.append(source.path)
    return counted


def names(package: list[Source]) -> Iterator[tuple[str, str]]:
    """Yields (name, place) of every assigned name and every parameter."""
    for source in package:
        for node in source.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, f"{source.path}:{node.lineno} {node.id}"
            elif isinstance(node, ast.arg):
                yield node.arg, f"{source.path}:{node.lineno} {node.arg}"


def whole_specifications(package: list[Source]) -> list[str]:
    """Returns the functions with a parameter whose annotation names RunSpec, the specification of a whole run."""
    places = []
    for source in package:
        for function in source.functions():
            parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            if any(p.annotation and re.search(r"\bRunSpec\b", ast.unparse(p.annotation)) for p in parameters):
                places.append(f"{source.path}:{function.lineno} {function.name}")
    return places


def length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def code_length(function: Function) -> int:
    """Returns the lines of a function without its docstring."""
    documented = ast.get_docstring(function, clean=False) is not None
    first = function.body[0]
    return length(function) - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)


def whole_configs(package: list[Source]) -> list[str]:
    """Returns the functions with a parameter that takes a whole configuration.

    These are parameters whose annotation names one of the configuration classes, and parameters called `config`
    without an annotation or with `Any`.
    """
    places = []
    for source in package:
        for function in source.functions():
            arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            named = any(a.annotation and WHOLE_CONFIG.search(ast.unparse(a.annotation)) for a in arguments)
            untyped = any(
                a.arg == "config" and (a.annotation is None or ast.unparse(a.annotation) == "Any") for a in arguments
            )
            if named or untyped and not source.path.startswith(CORE_CONFIGS):
                places.append(f"{source.path}:{function.lineno} {function.name}")
    return places


def single_use_helpers(package: list[Source]) -> list[str]:
    """Returns the private functions of up to SHORT lines whose name is used once in the whole package."""
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for source in package
        for node in source.nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return [
        f"{source.path}:{function.lineno} {function.name}"
        for source in package
        for function in source.functions()
        if re.match("_[^_]", function.name) and used[function.name] == 1 and length(function) <= SHORT
    ]


def openers_of_engines(package: list[Source]) -> list[str]:
    """Returns the modules that create engines, without the package `engines`, which defines them."""
    return [
        source.path
        for source in package
        if not source.path.startswith(f"{PACKAGE}/engines/")
        and any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ENGINES
            for node in source.nodes
        )
    ]


def two_way_imports(package: list[Source]) -> list[str]:
    """Returns the pairs of packages directly below megatron_rl that import each other, in functions too."""
    edges: set[tuple[str, str]] = set()
    for source in package:
        importer = Path(source.path).with_suffix("").parts[1]
        for node in source.nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}
            edges |= {(importer, target) for target in imported - {importer}}
    return [f"{a} <-> {b}" for a, b in sorted(edges) if a < b and (b, a) in edges]


def layering() -> ModuleType:
    """Returns the module of the layering test, which lists the layers and the leaves."""
    spec = importlib.util.spec_from_file_location("layering", ROOT / "tests/unit/project/test_layering.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer_exceptions() -> list[str]:
    """Returns the entries of the layering test that name a file inside a package in place of a package."""
    entries = [entry for layer in layering().LAYERS for entry in layer if "." in entry]
    return [entry for entry in entries if (ROOT / PACKAGE / (entry.replace(".", "/") + ".py")).exists()]


def of_leaves(places: list[str]) -> list[str]:
    """Returns the places, each of which begins with a path, that lie in the leaves of the package."""
    leaves = tuple(f"{PACKAGE}/{name.replace('.', '/')}" for name in layering().LEAVES)
    return [place for place in places if place.startswith(tuple(f"{leaf}{end}" for leaf in leaves for end in "/."))]


def sources_in(folders: tuple[str, ...]) -> list[Source]:
    """Returns the Python files below these folders, whose names end in a slash."""
    texts = {path: (ROOT / path).read_text() for path in tracked() if path.endswith(".py") and path.startswith(folders)}
    return [Source(path, text, list(ast.walk(ast.parse(text)))) for path, text in texts.items()]


def figures() -> dict[str, list[str]]:
    """Returns for each figure the places that it counts."""
    paths = tracked()
    sources = sources_in(("",))
    package = [source for source in sources if source.path.startswith(f"{PACKAGE}/")]
    makefile = (ROOT / "Makefile").read_text()
    lines, tokens = lines_of_code(package, paths), tokens_of_code(package)
    leaf_lines = of_leaves(lines)
    return {
        "lines of the core": [*(Counter(lines) - Counter(leaf_lines)).elements()],
        "tokens of the core": [*(Counter(tokens) - Counter(of_leaves(tokens))).elements()],
        "lines of the leaves": leaf_lines,
        "`fmt: skip`": [s.path for s in package for line in s.text.splitlines() if line.endswith("# fmt: skip")],
        **{
            figure: [place for name, place in names(sources_in(folders)) if GENERIC.fullmatch(name)]
            for figure, folders in NAMED_IN.items()
        },
        "whole-specification signatures": whole_specifications(package),
        "modules that import RunSpec": [s.path for s in package if re.search(r"import .*\bRunSpec\b", s.text)],
        "loose modules": [s.path for s in package if re.fullmatch(rf"{PACKAGE}/(?!__init__)\w+\.py", s.path)],
        "file exceptions of layers": layer_exceptions(),
        "two-way package imports": two_way_imports(package),
        "whole-config signatures": whole_configs(package),
        "single-use helpers": single_use_helpers(package),
        "raise per 1,000 lines": [
            f"{s.path}:{node.lineno}" for s in package for node in s.nodes if isinstance(node, ast.Raise)
        ],
        "openers of engines": openers_of_engines(package),
        "functions over 50 lines": [
            f"{s.path}:{function.lineno} {function.name} {length(function)}"
            for s in sources
            if not s.path.startswith("tests/")
            for function in s.functions()
            if length(function) > LONG
        ],
        "stages of the loop over 30 lines": [
            function.name for s in package if s.path == LOOP for function in s.functions() if code_length(function) > 30
        ],
        "files over 500 lines": [
            f"{s.path} {count}" for s in sources if (count := len(s.text.splitlines())) > FILE
        ],
        "Makefile targets": re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE),
        "CHANGELOG lines": (ROOT / "CHANGELOG.md").read_text().splitlines(),
    }  # fmt: skip


def values(places_of: dict[str, list[str]]) -> dict[str, float]:
    """Returns the number of each figure: the count of its places, and a rate for `raise` and generic names."""
    result: dict[str, float] = {name: len(places) for name, places in places_of.items()}
    raw = sum(len(source.text.splitlines()) for source in sources_in((f"{PACKAGE}/",)))
    result["raise per 1,000 lines"] = round(1000 * result["raise per 1,000 lines"] / raw, 1)
    for figure, folders in NAMED_IN.items():
        result[figure] = round(100 * result[figure] / sum(1 for _ in names(sources_in(folders))), 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when a figure is above its bar")
    parser.add_argument("--list", choices=BARS, metavar="FIGURE", help="print the places that a figure counts")
    arguments = parser.parse_args()
    places_of = figures()
    if arguments.list:
        places = Counter(places_of[arguments.list])
        print("\n".join(place if n == 1 else f"{n:6} {place}" for place, n in places.most_common()))
        return 0
    print(f"{'figure':32}{'value':>9}{'bar':>9}{'aim':>9}")
    beyond = []
    for name, value in values(places_of).items():
        bar, aim = BARS[name]
        print(f"{name:32}{value:>9,}{bar:>9,}{aim:>9,}")
        if value > bar:
            beyond.append(f'{name}: {value:,} is above the bar of {bar:,}. See: python tools/house.py --list "{name}"')
    print("\n".join(beyond), file=sys.stderr)
    return int(arguments.check and bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
