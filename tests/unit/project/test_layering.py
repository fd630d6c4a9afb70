"""Who may import whom: a lower layer never imports a higher one, heavy libraries stay behind their adapter, role names
in recipes.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl import engines
from megatron_rl.config.engine_kinds import KINDS
from megatron_rl.config.engines import Servers
from megatron_rl.config.model import Model, RoleConfig, TandemConfig
from megatron_rl.engines.kind import ModelFacts, ServerStart, kind_of
from megatron_rl.models.registry import families

PACKAGE = Path(__file__).parents[3] / "megatron_rl"
# Packages, and modules that stand in no package, from the lowest layer to the highest.
LAYERS = [
    ["types", "config", "devices", "lib", "key_value_store", "network"],
    ["models", "rewards", "run", "cluster", "weights", "texts"],
    ["batches", "algorithms", "data", "spec", "messages"],
    ["refit"],
    ["engines", "megatron"],
    ["training"],
    ["evaluation", "environments", "errors"],
    ["recipes"],
    ["contrib"],
    ["session"],
    ["jobs", "planning", "report", "conversion"],
    ["main", "commands", "api", "__main__"],
]
# Parts without which the rest of the package, its core, imports and trains. The core imports no leaf, and reaches some
# through the door lib.leaf_modules.leaf.
LEAVES = (
    *("api", "contrib", "conversion", "jobs", "planning", "report"),
    *(
        "commands.cluster",
        "commands.conversions",
        "commands.fetch",
        "commands.plan",
        "commands.report",
        "commands.watch",
    ),
    *("commands.init", "commands.split_data", "data.hub_fetch"),
    *("engines.embedded.cuda_graphs", "engines.sglang", "session.drift"),
    *("environments.line_process", "environments.search_tool", "environments.token_route"),
    *("environments.verifiers", "environments.verifiers_host"),
)
SIDE_BY_SIDE = (("engines", "megatron"), ("cluster", "engines"), ("cluster", "megatron"))  # neither imports the other
# The package that only some packages may import whole, those packages, and what of it the other packages may import.
INTERFACES = {
    "engines": (("engines", "session", "jobs", "commands", "conversion", "api", "errors"), ("engines.protocol",))
}
WHOLE_CONFIGS = ("TrainConfig", "SftConfig", "EvalConfig", "GenerateConfig")
TAKES_WHOLE_CONFIGS = ("config", "spec", "jobs", "commands", "api", "data")  # `data`: what a config names at the hub
CONFINED: dict[str, tuple[str, ...]] = {  # library -> the modules that may import it
    "megatron.core": ("megatron_rl.megatron",),
    "transformer_engine": ("megatron_rl.megatron",),
    "apex": ("megatron_rl.megatron",),
    "vllm": ("megatron_rl.engines.vllm.worker", "megatron_rl.engines.vllm.tandem", "megatron_rl.engines.vllm.routes"),
    "sglang": ("megatron_rl.engines.sglang.worker",),
    "nemo_run": (),  # tools/ only
    "omegaconf": (),  # changes what math-verify accepts
    "hydra": (),
    "ray": (),
}
FAMILY_ROOM = "megatron_rl.models"
ROLE_NAMES = {"generator", "verifier"}
ROLE_NAME_HOMES = (
    *("megatron_rl.recipes", "megatron_rl.contrib"),
    *(
        "megatron_rl.evaluation.text_scores",
        "megatron_rl.session.eval_servers",
    ),  # settings of `eval` that are called so
)
# What a user's own recipe, reward or environment may import, and so what a module of contrib may.
OPEN_TO_USERS = (
    *("types", "texts", "config.base", "config.plugins", "config.schema", "spec"),
    *("algorithms", "rewards", "recipes", "environments", "evaluation.judging", "engines.protocol", "contrib"),
    *("training.iteration", "training.rollouts", "batches.packed_batch"),
)
FILES = sorted(PACKAGE.rglob("*.py"))
ENGINE_LINES = [line.split(".")[2] for line in KINDS]  # as config/engine_kinds.py names them
ENGINES = {*ENGINE_LINES}


def module_of(path):
    parts = ["megatron_rl", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source):
    """Every module a source may load, those imported inside functions too; `from a import b` counts as a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(module, package):
    return module == package or module.startswith(package + ".")


def package_of(module):
    """Returns the package, or the module that stands in no package, as LAYERS names it; None for another library."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megatron_rl" and len(parts) > 1 else None


def layer(module):
    """Returns the number of the layer; None outside the package."""
    return next((i for i, packages in enumerate(LAYERS) if package_of(module) in packages), None)


def faults(module, source):
    """Returns what a source does that its layer may not, one line each."""
    own, here, out = layer(module), package_of(module), []
    for name in imports(source):
        target, there = layer(name), package_of(name)
        if target is not None and own is not None and target > own:
            out.append(f"{module} (layer {own}) imports {name} (layer {target})")
        if (here, there) in SIDE_BY_SIDE or (there, here) in SIDE_BY_SIDE:
            out.append(f"{module} imports {name}: {here} and {there} never import each other")
        inside, open_to_all = INTERFACES.get(there, ((here,), ()))
        if here not in inside and not any(under(name, f"megatron_rl.{part}") for part in open_to_all):
            out.append(f"{module} imports {name}: {here} may import {', '.join(open_to_all)} alone")
        if name.rpartition(".")[2] in WHOLE_CONFIGS and here not in TAKES_WHOLE_CONFIGS:
            out.append(f"{module} imports {name}: it takes a part of the run's specification")
        for library, homes in CONFINED.items():
            if under(name, library) and not any(under(module, home) for home in homes):
                out.append(f"{module} imports {name}, which belongs to {', '.join(homes) or 'tools'}")
    return out


def named_roles(source):
    return [
        n.value
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value in ROLE_NAMES
    ]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_imports_only_what_its_layer_may(path):
    assert not faults(module_of(path), path.read_text())


def test_contrib_imports_what_a_users_file_may_and_no_other_package_imports_it():
    for path in FILES:
        module, found = module_of(path), [name for name in imports(path.read_text()) if under(name, "megatron_rl")]
        if under(module, "megatron_rl.contrib"):
            closed = [name for name in found if not any(under(name, f"megatron_rl.{open_}") for open_ in OPEN_TO_USERS)]
            assert not closed, f"{module} imports {closed}"
        else:
            assert not [name for name in found if under(name, "megatron_rl.contrib")], module


def is_leaf(module):
    return any(under(module, f"megatron_rl.{name}") for name in LEAVES)


def test_the_core_imports_no_leaf():
    for path in FILES:
        module = module_of(path)
        if not is_leaf(module) and module != "megatron_rl":  # `megatron_rl` imports its API when it is asked for
            reached = [name for name in imports(path.read_text()) if is_leaf(name)]
            assert not reached, f"{module} imports {reached}: use megatron_rl.lib.leaf_modules.leaf"


def test_every_leaf_is_there():
    assert not [name for name in LEAVES if not any(under(module_of(path), f"megatron_rl.{name}") for path in FILES)]


def test_every_module_has_a_layer():
    without = [module_of(p) for p in FILES if layer(module_of(p)) is None and p.name != "__init__.py"]
    assert not without, f"give a layer in tests/unit/project/test_layering.py to {without}"


def test_packages_import_each_other_in_one_direction():
    """Two packages never import each other, nor do more of them in a circle."""
    below = {package: set() for packages in LAYERS for package in packages}
    for path in FILES:
        own = package_of(module_of(path))
        below[own or "__main__"] |= {package_of(name) for name in imports(path.read_text())} & below.keys() - {own}
    order = TopologicalSorter(below)
    order.prepare()  # it raises CycleError


@pytest.mark.parametrize(
    "module, source",
    [
        ("megatron_rl.types", "from megatron_rl.training import rollouts"),
        ("megatron_rl.training.loop", "def f():\n    from megatron_rl.recipes.tango import Tango"),
        ("megatron_rl.recipes.tango", "import megatron_rl.engines.embedded"),
        ("megatron_rl.engines.embedded", "from megatron_rl.megatron.policy import MegatronPolicy"),
        ("megatron_rl.training.rollouts", "from megatron.core import parallel_state"),
        ("megatron_rl.engines.embedded", "import vllm"),
        ("megatron_rl.engines.vllm.client", "import sglang.srt"),
        ("megatron_rl.session.launch_ranks", "import nemo_run"),
        ("megatron_rl.session.train", "from megatron_rl.config.schema import TrainConfig"),
    ],
)
def test_the_rules_catch_what_they_forbid(module, source):
    assert faults(module, source)


@pytest.mark.parametrize(
    "module, source",
    [
        ("megatron_rl.recipes.tango", "from megatron_rl.engines.protocol import Sampling"),
        ("megatron_rl.megatron.policy", "from megatron.core import mpu"),
        ("megatron_rl.engines.vllm.client", "import torch"),
        (
            "megatron_rl.session.train",
            "from megatron_rl.recipes.tango import Tango\nfrom megatron_rl.megatron.policy import MegatronPolicy",
        ),
    ],
)
def test_the_rules_allow_what_they_should(module, source):
    assert not faults(module, source)


def test_role_names_stand_in_recipes_alone():
    elsewhere = {module_of(p): names for p in FILES if (names := named_roles(p.read_text()))}
    assert not {m: names for m, names in elsewhere.items() if not any(under(m, home) for home in ROLE_NAME_HOMES)}
    assert elsewhere, "the recipes name their roles"


def named_families(source):
    """Returns the families that a source names: as an identifier or a part of one, or as a whole string."""
    names = {*families(), *(family.replace("_", "") for family in families())}
    found = []
    for node in ast.walk(ast.parse(source)):
        told = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
        words = {word for text in told if isinstance(text, str) for word in [text, *text.split("."), *text.split("_")]}
        words |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
        found += sorted(words & names)
    return found


def test_families_are_named_in_their_own_files_alone():
    elsewhere = {module_of(p): names for p in FILES if (names := named_families(p.read_text()))}
    assert not {m: names for m, names in elsewhere.items() if not under(m, FAMILY_ROOM)}
    assert {type(family).__module__ for family in families().values()} <= elsewhere.keys()


@pytest.mark.parametrize(
    "source",
    [
        'if sizes.family == "llama": pass',
        "from megatron_rl.models.qwen3_moe import FAMILY",
        'shapes = {"mixtral": 1}',
        "def qwen2(): pass",
        "read(mistral=True)",
    ],
)
def test_a_familys_name_elsewhere_is_found(source):
    assert named_families(source)


def named_engines(source):
    """Returns the kinds of servers that a source names: as an identifier or a part of one, or as a whole string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        told = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module", "value")]
        words = {word.lower() for text in told if isinstance(text, str) for word in re.split(r"[._:]", text)}
        found += sorted(words & ENGINES)
    return found


def test_engines_are_named_in_their_own_folders_and_in_one_line_of_the_config():
    """A new engine is its folder and that line."""
    homes = [f"megatron_rl.engines.{engine}" for engine in ENGINES]
    elsewhere = {module_of(p): names for p in FILES if (names := named_engines(p.read_text()))}
    others = {m: names for m, names in elsewhere.items() if not any(under(m, home) for home in homes)}
    assert others == {"megatron_rl.config.engine_kinds": [*ENGINE_LINES]}


def test_an_engine_is_found_by_the_name_of_its_folder(tmp_path, monkeypatch):
    """The rest of the package asks its settings and its object, and knows nothing else of it."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "kind.py").write_text(
        "from megatron_rl.engines.kind import Command, EngineKind\n"
        "from megatron_rl.engines.server import Server\n"
        "ENGINE = EngineKind(\n"
        "    name='toy', make_target='engines-toy',\n"
        "    command=lambda settings, start: Command([start.python, '-m', 'toy', str(start.port)], {}),\n"
        "    client=lambda url, token, settings, timeout_s, facts: Server(url, {}, ends=(), vocab=facts.vocab),\n"
        ")\n"
    )
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    settings = Servers(kind="toy")
    kind = kind_of(settings)
    start = ServerStart(python="python", model=tmp_path, dtype="float32", port=9, token_file=tmp_path, on_gpu=False)
    assert kind.command(settings, start).words == ["python", "-m", "toy", "9"]
    assert kind.client("http://127.0.0.1:9", "token", settings, 1.0, ModelFacts(vocab=7)).version() == 0
    tandem = RoleConfig(model=Model(path="m"), tandem=TandemConfig(), router_replay=True)
    assert [line.partition(" with ")[0] for line in settings.role_problems({"a": tandem})] == [
        "roles.a.tandem", "roles.a.router_replay = true"
    ]  # fmt: skip


def test_reading_a_config_loads_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_rl.config.schema, megatron_rl.spec.resolve, megatron_rl.main; "
        "print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    loaded = ast.literal_eval(done.stdout)
    assert not {"torch", "megatron", "transformers", "vllm", "sglang"} & set(loaded) and "pydantic" in loaded


def test_one_file_imports_nemo_run():
    files = [*PACKAGE.parent.glob("tools/**/*.py"), *PACKAGE.parent.glob("examples/**/*.py")]
    assert [path.name for path in files if any(under(name, "nemo_run") for name in imports(path.read_text()))] == [
        "launch.py"
    ]


# What the package itself may import, to load the rest when it is asked for.
LAZY = ["importlib", "typing", "typing.TYPE_CHECKING", "typing.Any"]


def test_importing_the_package_loads_nothing():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != PACKAGE:
            assert not list(imports(path.read_text())), f"{path} imports: a package stays empty but for its docstring"
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    assert set(imports(ast.unparse(tree))) <= set(LAZY)


def test_what_the_package_gives_is_loaded_when_it_is_asked_for():
    code = (
        "import sys, megatron_rl; before = {m.split('.')[0] for m in sys.modules}; "
        "print(sorted(before), [getattr(megatron_rl, n) for n in megatron_rl.__all__], sep='//')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    loaded, _, given = done.stdout.partition("//")
    assert not {"torch", "numpy", "pydantic", "yaml", "pyarrow", "transformers"} & set(ast.literal_eval(loaded))
    assert all(f".{name}'" in given for name in megatron_rl.__all__)


def test_no_two_files_of_tests_have_the_same_name():
    """pytest imports them by name alone: with two of one name `pytest tests` collects nothing."""
    names = [path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
