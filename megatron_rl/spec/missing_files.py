"""Finds the files, directories and engine packages that a specification names and that are missing on this machine.

This module does not import torch.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import hub_cache
from megatron_rl.config.data_settings import generated_name
from megatron_rl.config.engines import Servers
from megatron_rl.spec.run_spec import EngineSpec, RunSpec, SftSpec, Spec

PACKAGE = "megatron_rl."
# Import paths of the graders and tools that run model-generated code in a sandbox.
RUNS_CODE = ("rewards.code_cases:grade", "rewards.code_answer:grade_input", "environments.python_tool:PythonTool")
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# End of an error message about a program that is not installed on this machine
ELSEWHERE = "; to check a run that starts on another machine, give `check` the option --elsewhere"


@dataclass(frozen=True)
class Absent:
    """A file or directory that a setting names and that does not exist on this machine."""

    name: str  # name of the setting
    path: str
    on_hub: bool = False  # whether `path` names a Hugging Face Hub repository, which the run can download
    kind: hub_cache.Kind = "models"  # type of the Hub repository: models or datasets

    def __str__(self) -> str:
        if self.on_hub:
            return f"{self.name} = {self.path} is no directory here, so it is taken for a hub name"
        return f"{self.name} = {self.path} is not there yet"

    @property
    def fetch(self) -> str:
        """Returns the shell command that downloads the files from the Hugging Face Hub."""
        return f"hf download {self.path}" + (" --repo-type dataset" if self.kind == "datasets" else "")

    @property
    def problem(self) -> str | None:
        """Returns why a run on this machine would fail without the file, and how to fix it; None if the file can be
        downloaded from the hub."""
        if not self.on_hub:
            folder = Path(self.path).parent
            taken = self.path.count("/") == 1 and folder != Path() and folder.is_dir()
            fetch = f", or fetch the hub's first ({self.fetch})" if taken else ""
            return f"{self.name} = {self.path} is not there: put it there, or mend {self.name}{fetch}"
        if hub_cache.offline() and not hub_cache.is_cached(self.path, self.kind):
            return (
                f"{self.name} = {self.path} is no directory here, HF_HUB_OFFLINE is set, and the cache "
                f"{hub_cache.cache()} does not have it: fetch it where there is a network, with the same HF_HOME, or "
                "unset HF_HUB_OFFLINE"
            )
        return None


def absent_files(spec: Spec) -> list[Absent]:
    """Returns the files and directories that a specification names and that do not exist yet.

    A missing file is not yet an error, because an earlier job may write the file before the run starts.
    """
    models = {f"{name}.path": model.path for name, model in spec.models.items()}
    models |= {f"{name}.tokenizer": model.tokenizer for name, model in spec.models.items() if model.tokenizer}
    models |= {
        f"roles.{name}.tandem.junior": role.tandem.junior
        for name, role in spec.roles.items()
        if role.tandem is not None and role.tandem.junior is not None
    }
    data = {name: source.path for name, source in spec.sets.items() if generated_name(source.path) is None}
    if isinstance(spec, SftSpec):
        data |= {"data.train": spec.data.train, "data.validation": spec.data.validation or ""}
    absent = [
        Absent(name, path, _is_hub_name(path, "models")) for name, path in models.items() if not Path(path).is_dir()
    ]
    absent += [
        Absent(name, path, _is_hub_name(path, "datasets"), "datasets")
        for name, path in data.items()
        if path and not Path(path).exists()
    ]
    return absent + [Absent(name, path) for name, path in _files(spec).items() if not Path(path).exists()]


def _files(spec: Spec) -> Mapping[str, str]:
    """Returns {name of the setting: path} of the files that a run reads from this machine and cannot download, such as
    chat templates and token files."""
    files = {f"{name}.chat_template": m.chat_template for name, m in spec.models.items() if m.chat_template is not None}
    files |= {
        f"roles.{name}.tandem.boundary_ids": role.tandem.boundary_ids
        for name, role in spec.roles.items()
        if role.tandem is not None and role.tandem.boundary_ids is not None
    }
    if isinstance(spec, RunSpec):
        files |= spec.recipe.files()
        files |= {"debug.replay": str(spec.data.replay)} if spec.data.replay is not None else {}
    settings = None if spec.engine is None else spec.engine.settings
    if isinstance(settings, Servers) and settings.token_file is not None:
        files["engine.token_file"] = settings.token_file
    return files


def server_problems(engine: EngineSpec | None) -> list[str]:
    """Returns the reasons why a run could not start its servers on this machine."""
    settings = None if engine is None else engine.settings
    if not isinstance(settings, Servers) or settings.urls or not settings.start:
        return []
    if settings.python is not None:
        missing = shutil.which(settings.python) is None
        error = f"engine.python = {settings.python} is not there: run `make engines`, or mend the path{ELSEWHERE}"
        return [error] if missing else []
    if importlib.util.find_spec(settings.kind) is None:
        return [
            f"engine.kind = {settings.kind!r}: the package {settings.kind} is not installed here; run `make engines`, "
            f"and set engine.python to the interpreter that has it{ELSEWHERE}"
        ]
    return []


def transport_problems(engine: EngineSpec | None) -> list[str]:
    """Returns the reasons why a trainer on this machine could not send weights with the configured transport."""
    if engine is None or engine.refit.transport != "nixl" or importlib.util.find_spec("nixl") is not None:
        return []
    cure = "pip install 'nixl[cu13]', or set it to auto"
    return [f"refit.transport = 'nixl': the package nixl is not installed here; {cure}"]


def sandbox_problems(settings: Mapping[str, Any]) -> list[str]:
    """Returns the reasons why graders and tools could not run model-generated code in a sandbox on this machine."""
    if shutil.which("bwrap") is not None:
        return []
    used = [target for target in _targets(settings) if target.removeprefix(PACKAGE) in RUNS_CODE]
    return [
        f"{target} runs code of models, and the program bwrap is not installed here: install bubblewrap (package "
        "`bubblewrap` of Debian, Ubuntu, RHEL)"
        for target in dict.fromkeys(used)
    ]


def _targets(value: Any) -> Iterator[str]:
    """Yields the import paths of all plug-ins in the nested values of a config: the texts that are values of a key
    `target`."""
    if isinstance(value, Mapping):
        if isinstance(value.get("target"), str):
            yield value["target"]
        value = list(value.values())
    for nested in value if isinstance(value, list | tuple) else ():
        yield from _targets(nested)


def _is_hub_name(path: str, kind: hub_cache.Kind) -> bool:
    """Returns whether a path that does not exist locally is treated as the name of a Hugging Face Hub repository:
    `owner/name`, or also `name` for a data set. If the local folder `owner` exists, `owner/name` is treated as a
    repository only if the local Hugging Face cache contains this repository."""
    if Path(path).suffix in _DATA_FILES or not _HUB_NAME.fullmatch(path):
        return False
    if "/" not in path:
        return kind == "datasets"
    return not Path(path).parent.is_dir() or hub_cache.is_cached(path, kind)
