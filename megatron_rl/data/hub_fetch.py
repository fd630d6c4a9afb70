"""Downloads models and data sets from the Hugging Face hub into folders, and records their commits and checksums."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from megatron_rl.config.base import sections
from megatron_rl.config.schema import (
    ConfigError,
    EvalConfig,
    GenerateConfig,
    PromptSet,
    SftConfig,
    TrainConfig,
    models_of,
)
from megatron_rl.run.atomic_files import write_text
from megatron_rl.run.file_checksums import digests, keep

Kind = Literal["model", "dataset"]
Config = TrainConfig | SftConfig | EvalConfig | GenerateConfig
KINDS: dict[str, Kind] = {"model": "model", "dataset": "dataset"}
# File beside the downloaded files that records the repository, the commit, and the size and SHA-256 of each file.
# The sizes and checksums are written at the end of the download.
# The name begins with a dot, because the library `datasets` loads all other JSON files of a folder as rows.
RECORD = ".fetched.json"
# Folder in which the library huggingface_hub stores NAME.metadata for each downloaded file NAME
BROUGHT = ".cache/huggingface/download"
DATASETS = "datasets"  # subfolder for all data sets, in the folder that is passed to `fetch`
WEIGHTS = "*.safetensors"
FILES: dict[Kind, Sequence[str]] = {  # patterns of the files to download: neither pickles nor code
    "model": (WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja"),
    "dataset": ("*.parquet", "*.jsonl", "*.json", "*.csv", "README.md"),
}
LEFT_OUT: dict[Kind, Sequence[str]] = {"model": ("*/*",), "dataset": (".*",)}  # model files are in the top folder
# Connection errors. The name of huggingface_hub's base class of HTTP errors depends on the version of the library.
# When one of several downloads fails, the library closes its HTTP client, and the other downloads raise RuntimeError.
BROKEN: tuple[type[BaseException], ...] = (OSError, RuntimeError, HfHubHTTPError.__mro__[1])
AGAIN = "what is there stays: give the same command again, and it goes on"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A repository of the hub to download, and the settings of a config that name it."""

    name: str  # owner/name
    kind: Kind | None = None  # None: a model, or a data set if there is no model of this name
    # Branch, tag or commit; None: the commit that was downloaded before; if there is none, the newest commit
    revision: str | None = None
    weights: bool = True  # False: only config and tokenizer
    keys: tuple[str, ...] = ()  # settings that name the repository


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A repository of the hub that was downloaded completely into a folder."""

    repo: Wanted
    folder: Path
    commit: str
    files: Mapping[str, Mapping[str, Any]]  # {name: {bytes, sha256}}
    new: bool  # whether files were downloaded by this call; False if all files had been downloaded before

    @property
    def size(self) -> int:
        """Returns the total size of the files in bytes."""
        return sum(facts["bytes"] for facts in self.files.values())


def parse(word: str) -> Wanted:
    """Parses OWNER/NAME, model:OWNER/NAME or dataset:OWNER/NAME, each optionally followed by @REVISION. Raises
    ConfigError for any other text."""
    kind, colon, rest = word.partition(":")
    name, _, revision = (rest if colon else word).partition("@")
    known_kind = KINDS.get(kind) if colon else None
    if (colon and known_kind is None) or name.count("/") != 1:
        raise ConfigError(f"{word!r}: give OWNER/NAME of the hub, model:OWNER/NAME, dataset:OWNER/NAME, or a YAML file")
    return Wanted(name=name, kind=known_kind, revision=revision or None)


def wanted_by(config: Config) -> list[Wanted]:
    """Returns the repositories of the hub that a config names, each once. Names of existing local files and directories
    are left out.

    If an endpoint serves a model, or the model starts with random weights, only its config and tokenizer are wanted.
    """
    repositories: dict[tuple[str, Kind], Wanted] = {}
    for key, name, kind, weights in _named(config):
        if not on_hub(name):
            continue
        old = repositories.get((name, kind), Wanted(name=name, kind=kind, weights=False))
        repositories[name, kind] = dataclasses.replace(old, weights=old.weights or weights, keys=(*old.keys, key))
    return [*repositories.values()]


def on_hub(name: str) -> bool:
    """Returns whether a path of a config is a name OWNER/NAME of the hub, and not a local file or directory."""
    file = Path(name)
    is_file = file.suffix in (".jsonl", ".json", ".parquet", ".csv") or file.exists()
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and ":" not in name and not is_file


def fetch(repo: Wanted, to: Path, *, endpoint: str | None = None) -> Fetched:
    """Downloads a model to TO/owner/name or a data set to TO/datasets/owner/name, and verifies all checksums.

    Existing files are kept, and broken connections are retried. An interrupted download continues with the same commit.
    Files of an earlier commit that the new commit lacks are removed at the end. `endpoint`: address of the hub, by
    default HF_ENDPOINT. Raises ConfigError if the repository does not exist or requires consent, the hub cannot be
    reached, the disk is full, or a checksum differs from the hub's.
    """
    kinds: Sequence[Kind] = (repo.kind,) if repo.kind else ("model", "dataset")
    for kind in kinds:
        candidate = dataclasses.replace(repo, kind=kind)
        if fetched := _there(candidate, _folder(candidate, to)):
            return fetched
    with _explained(repo):
        for kind in kinds:
            candidate = dataclasses.replace(repo, kind=kind)
            try:
                return _download(candidate, _folder(candidate, to), HfApi(endpoint=endpoint))
            except RepositoryNotFoundError as error:
                if isinstance(error, GatedRepoError) or kind == kinds[-1]:
                    raise
    raise AssertionError("the last kind returns or raises")


def _download(repo: Wanted, folder: Path, api: HfApi) -> Fetched:
    kind, record_before = repo.kind, _record(folder)
    assert kind is not None
    brought = {str(file.relative_to(folder / BROUGHT)) for file in (folder / BROUGHT).rglob("*.metadata")}
    brought = {name.removesuffix(".metadata") for name in brought}
    if any(name.endswith(".safetensors") for name in brought):
        # Weights that were downloaded before are kept, even if no weights are requested now
        repo = dataclasses.replace(repo, weights=True)
    ask = api.model_info if kind == "model" else api.dataset_info
    info = ask(repo.name, revision=repo.revision or record_before.get("commit"), files_metadata=True)
    listed = {file.rfilename: file for file in info.siblings or ()}
    patterns = [p for p in FILES[kind] if repo.weights or p != WEIGHTS]
    left_out = [*LEFT_OUT[kind], RECORD]  # a file with this name in the repository would replace the record
    names = sorted(filter_repo_objects(listed, allow_patterns=patterns, ignore_patterns=left_out))
    weightless = repo.weights and not any(name.endswith(".safetensors") for name in names)
    if kind == "model" and ("config.json" not in names or weightless):
        lacks = "*.safetensors" if "config.json" in names else "config.json"
        raise ConfigError(
            f"{repo.name} has no {lacks}: name a model of transformers, or a revision that has it, as "
            f"{repo.name}@REVISION"
        )
    if kind == "dataset" and not {*names} - {"README.md"}:
        raise ConfigError(f"{repo.name} has no Parquet, JSON or CSV files: it is made by a program, which is not run")
    folder.mkdir(parents=True, exist_ok=True)
    missing = sum(listed[name].size or 0 for name in names if not (folder / name).is_file())
    if missing > (free := shutil.disk_usage(folder).free):
        raise ConfigError(f"{folder} has {free / 1e9:.1f} GB free, {repo.name} needs {missing / 1e9:.1f}: make room")
    record = {"repository": repo.name, "type": kind, "commit": info.sha, "hub": api.endpoint}
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
    snapshot_download(
        repo.name, repo_type=kind, revision=info.sha, local_dir=folder, endpoint=api.endpoint,
        allow_patterns=patterns, ignore_patterns=left_out,
    )  # fmt: skip
    checksums = digests(folder, names)
    if wrong := [name for name in names if not _as_listed(folder / name, checksums[name], listed[name])]:
        for name in wrong:
            (folder / name).unlink()
        raise ConfigError(f"{folder}: {', '.join(wrong)} came damaged and was removed; {AGAIN}")
    # Removes files of an earlier commit, because the library `datasets` would load their rows as well
    for name in brought.difference(names):
        (folder / name).unlink(missing_ok=True)
        (folder / BROUGHT / f"{name}.metadata").unlink()
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": checksums[name]} for name in names}
    keep(folder, checksums)
    write_text(folder / RECORD, json.dumps({**record, "files": files}, indent=1) + "\n")
    return Fetched(repo=repo, folder=folder, commit=str(info.sha), files=files, new=True)


def _there(repo: Wanted, folder: Path) -> Fetched | None:
    """Returns the repository as a Fetched if all of its files are already in `folder`, otherwise None. Needs no
    network."""
    record = _record(folder)
    files, commit = record.get("files", {}), record.get("commit", "")
    if not files or repo.revision not in (None, commit):
        return None
    if repo.kind == "model" and repo.weights and not any(name.endswith(".safetensors") for name in files):
        return None
    if any(not (folder / n).is_file() or (folder / n).stat().st_size != facts["bytes"] for n, facts in files.items()):
        return None
    return Fetched(repo=repo, folder=folder, commit=commit, files=files, new=False)


def _as_listed(file: Path, sha256: str, listed: Any) -> bool:
    """Returns whether a file has the checksum that the hub lists: the SHA-256 of a large (LFS) file, or git's SHA-1 of
    a small file. `sha256`: the file's SHA-256."""
    if listed.lfs is not None:
        return listed.lfs.sha256 == sha256
    content = file.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return listed.blob_id in (None, hashlib.sha1(header + content, usedforsecurity=False).hexdigest())


def _named(config: Config) -> Iterator[tuple[str, str, Kind, bool]]:
    """Yields (key, name, kind, whether weights are wanted) for every model and data set in a config."""
    roles = config.roles if isinstance(config, TrainConfig) else {}
    served = {f"roles.{name}.model" for name, role in roles.items() if role.endpoint is not None}
    for key, model in models_of(config).items():
        yield f"{key}.path", model.path, "model", model.init == "pretrained" and key not in served
        yield f"{key}.tokenizer", model.tokenizer or "", "model", False
    for name, role in roles.items():
        if role.tandem is not None:
            yield f"roles.{name}.tandem.junior", role.tandem.junior or "", "model", True
    if isinstance(config, SftConfig):
        yield "data.train", config.data.train, "dataset", True
        yield "data.validation", config.data.validation or "", "dataset", True
    for key, source in sections(config, PromptSet).items():
        yield f"{key}.path", source.path, "dataset", True


def _folder(repo: Wanted, to: Path) -> Path:
    return to / repo.name if repo.kind == "model" else to / DATASETS / repo.name


def _record(folder: Path) -> dict[str, Any]:
    """Returns the contents of RECORD in a folder; an empty dict if the file is missing or damaged."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


@contextlib.contextmanager
def _explained(repo: Wanted) -> Iterator[None]:
    """Context manager that converts errors of the hub's library to a ConfigError with instructions for the user."""
    name, what = repo.name, {"model": "model", "dataset": "data set", None: "model and no data set"}[repo.kind]
    cures: dict[type[BaseException], str] = {  # {error: instruction}; the first match is used
        GatedRepoError: f"{name} asks for consent: accept its terms on its page at the hub, then log in by "
        "`hf auth login` or set HF_TOKEN to a token of that account",
        RepositoryNotFoundError: f"the hub shows no {what} {name}: look at the spelling; a private one is shown to its "
        "owner's token alone (`hf auth login`, or HF_TOKEN)",
        RevisionNotFoundError: f"{name} has no revision {repo.revision!r}: give a branch, a tag or a commit",
        OfflineModeIsEnabled: f"{name} is not here, and HF_HUB_OFFLINE forbids to fetch it: unset it, on a host with a "
        "network",
        HFValidationError: f"{name!r} is no name of the hub: ",
    }
    try:
        yield
    except (*cures, *BROKEN) as error:
        if (cure := next((cure for kind, cure in cures.items() if isinstance(error, kind)), None)) is None:
            cure = (
                f"{name} could not be fetched ({type(error).__name__}: {error}). Has this host a network, and does it "
                f"need HTTPS_PROXY or HF_ENDPOINT? {AGAIN[0].upper()}{AGAIN[1:]}"
            )
        raise ConfigError(f"{cure}{error}" if isinstance(error, HFValidationError) else cure) from error
