"""Finds the files, directories and engines that a config names and that are not on this machine.

Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import hub
from megatron_rl.config.data_settings import generated_name
from megatron_rl.config.schema import ConfigError, EvalConfig, Model, PromptSet, Servers, SftConfig, TrainConfig

PACKAGE = "megatron_rl."
# Graders and tools that run code of models in a sandbox.
RUNS_CODE = (
    "rewards.code_cases:grade",
    "rewards.code_cases:grade_share",
    "rewards.code_answer:grade_input",
    "environments.python_tool:PythonTool",
)
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Absent:
    """A file or directory that the config names and that does not exist here."""

    name: str  # of the setting
    path: str
    on_hub: bool  # it is taken for a name at the Hugging Face hub, and fetched from there
    kind: hub.Kind = "models"  # what the hub has under that name

    def __str__(self) -> str:
        if self.on_hub:
            return f"{self.name} = {self.path} is no directory here, so it is taken for a hub name"
        return f"{self.name} = {self.path} is not there yet"

    @property
    def fetch(self) -> str:
        """Returns the command that brings it here from the hub."""
        return f"hf download {self.path}" + (" --repo-type dataset" if self.kind == "datasets" else "")

    @property
    def problem(self) -> str | None:
        """Returns why a run here would fail, with the cure; None for a name that the hub may have."""
        if not self.on_hub:
            folder = Path(self.path).parent
            taken = self.path.count("/") == 1 and folder != Path() and folder.is_dir()
            fetch = f", or fetch the hub's first ({self.fetch})" if taken else ""
            return f"{self.name} = {self.path} is not there: put it there, or mend {self.name}{fetch}"
        if hub.offline() and not hub.is_cached(self.path, self.kind):
            return (
                f"{self.name} = {self.path} is no directory here, HF_HUB_OFFLINE is set, and the cache {hub.cache()} "
                "does not have it: fetch it where there is a network, with the same HF_HOME, or unset HF_HUB_OFFLINE"
            )
        return None


def absent_files(config: Any) -> list[Absent]:
    """Returns each file or directory that the config names and that does not exist yet.

    An earlier stage may still make it.
    """
    out = [Absent(name, path, _is_model_name(path)) for name, path in _models(config) if not Path(path).is_dir()]
    for name, source in prompt_sets(config):
        if source.path and generated_name(source.path) is None and not Path(source.path).exists():
            out.append(Absent(name, source.path, _is_data_name(source.path), "datasets"))
    if isinstance(config, SftConfig):
        splits = {"data.train": config.data.train, "data.validation": config.data.validation or ""}
        out += [Absent(n, p, _is_data_name(p), "datasets") for n, p in splits.items() if p and not Path(p).exists()]
    out += [Absent(name, path, False) for name, path in _files(config) if not Path(path).exists()]
    return out


def absent_recipe_files(recipe: Any) -> list[Absent]:
    """Returns each file that a recipe's plug-ins read and that does not exist yet."""
    return [Absent(name, path, False) for name, path in recipe.files().items() if not Path(path).exists()]


def engine_problems(config: Any) -> list[str]:
    """Returns why servers that a run starts itself could not be started here."""
    engine = vars(config).get("engine")
    if not isinstance(engine, Servers) or engine.urls or not engine.start:
        return []
    if engine.python is not None:
        return (
            []
            if shutil.which(engine.python)
            else [f"engine.python = {engine.python} is not there: run `make engines`, or mend the path"]
        )
    if importlib.util.find_spec(engine.kind) is None:
        return [
            f"engine.kind = {engine.kind!r}: the package {engine.kind} is not installed here; run `make engines`, and "
            "set engine.python to the interpreter that has it"
        ]
    return []


def sandbox_problems(config: Any) -> list[str]:
    """Returns why the code of models that a run has graded or run as a tool could not be run here."""
    if shutil.which("bwrap") is not None:
        return []
    used = [target for target in _targets(asdict(config)) if target.removeprefix(PACKAGE) in RUNS_CODE]
    return [
        f"{target} runs code of models, and the program bwrap is not installed here: install bubblewrap (package "
        "`bubblewrap` of Debian, Ubuntu, RHEL)"
        for target in dict.fromkeys(used)
    ]


def _targets(value: Any) -> Iterator[str]:
    """Yields every `target` in a config's values."""
    if isinstance(value, Mapping):
        if isinstance(value.get("target"), str):
            yield value["target"]
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else ():
        yield from _targets(one)


def refuse(config: Any, *others: Absent) -> None:
    """Raises ConfigError that names what a run on this machine would miss: of the config, and `others`."""
    found = [one.problem for one in (*absent_files(config), *others)]
    problems = [problem for problem in found if problem is not None]
    problems += engine_problems(config) + sandbox_problems(config)
    if problems:
        raise ConfigError("\n  ".join(problems))


def prompt_sets(config: Any) -> list[tuple[str, PromptSet]]:
    """Returns the problem sets of a config by the names of their settings."""
    if isinstance(config, TrainConfig):
        found = [("data", config.data), ("evaluation.prompts", config.evaluation.prompts)]
        found += [(f"roles.{name}.data", role.data) for name, role in config.roles.items()]
    else:
        found = [("data", vars(config).get("data"))]
    return [(name, source) for name, source in found if isinstance(source, PromptSet)]


def _models(config: Any) -> Iterator[tuple[str, str]]:
    """Yields (setting, path) of the model directories."""
    for name, own in model_sections(config):
        yield f"{name}.path", own.path
        if own.tokenizer is not None:
            yield f"{name}.tokenizer", own.tokenizer
    for name, role in vars(config).get("roles", {}).items():
        if role.tandem is not None and role.tandem.junior is not None:
            yield f"roles.{name}.tandem.junior", role.tandem.junior


def model_sections(config: Any) -> Iterator[tuple[str, Model]]:
    """Yields (setting, section) of the models that a config's command reads."""
    for name, role in vars(config).get("roles", {}).items():
        if role.same_as is None and (role.endpoint is None or role.model.path):
            yield f"roles.{name}.model", role.model
    for name in ("model", "junior", "base"):
        own = vars(config).get(name)
        if own is not None:
            yield name, own
    if isinstance(config, EvalConfig) and config.verifier is not None:
        yield "verifier.model", config.verifier.model


def _files(config: Any) -> Iterator[tuple[str, str]]:
    """Yields (setting, path) of files that no hub has."""
    if isinstance(config, TrainConfig) and config.debug.replay:
        yield "debug.replay", config.debug.replay
    for name, own in model_sections(config):
        if own.chat_template is not None:
            yield f"{name}.chat_template", own.chat_template
    engine = vars(config).get("engine")
    if isinstance(engine, Servers) and engine.token_file is not None:
        yield "engine.token_file", engine.token_file


def _is_model_name(path: str) -> bool:
    """Returns whether a path that is not here is fetched from the hub: `owner/name`, where `owner` is no folder here
    and the hub's cache may have it."""
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return False
    return not Path(path).parent.is_dir() or hub.is_cached(path, "models")


def _is_data_name(path: str) -> bool:
    """Returns whether data that are not here are fetched from the hub: `name` or `owner/name`, as for models."""
    if Path(path).suffix in _DATA_FILES or not _HUB_NAME.fullmatch(path):
        return False
    return "/" not in path or not Path(path).parent.is_dir() or hub.is_cached(path, "datasets")
