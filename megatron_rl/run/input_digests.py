"""Records digests of all inputs of a run in RUN/inputs.json, and reports inputs whose contents have changed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rl.config import hub_cache
from megatron_rl.config.base import ConfigError
from megatron_rl.config.model import Model
from megatron_rl.config.sources import is_code, sources
from megatron_rl.run.checkpoint import read_json, write_json
from megatron_rl.run.file_checksums import THREADS, quick_digest
from megatron_rl.run.json_lines import UNREADABLE
from megatron_rl.run.run_directory import RunError

FILE = "inputs.json"
# Names of the two sections of the record: files, and inputs that are known only after the data were loaded
FILES, LATER = "files", "later"
Input = Mapping[str, Any]  # record of one input: path, and the values to compare: bytes and sha256, rows, or revision
SHOWN = 10  # maximum number of inputs named in a message
_log = logging.getLogger(__name__)


def read_files(settings: Mapping[str, Any]) -> dict[str, Input]:
    """Returns {name: {path, bytes, sha256}} of the files that a run reads (see config.sources).

    `settings`: the resolved config as plain values. Raises ConfigError if a file cannot be read.
    """
    files = sources(settings)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            digests = threads.map(quick_digest, files.values())
            return {
                name: {"path": str(file), "bytes": file.stat().st_size, "sha256": digest}
                for (name, file), digest in zip(files.items(), digests, strict=True)
            }
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error


def read_revisions(models: Mapping[str, Model]) -> dict[str, Input]:
    """Returns {name: {path, revision}} of the models from the Hugging Face hub.

    The revision is the commit of the `main` branch in the hub's cache. Call the function after the models' tokenizers
    were loaded, so that the cache is up to date.
    """
    named = {name: model.path for name, model in models.items() if not Path(model.path).exists()}
    heads = {name: (path, hub_cache.head(path, "models")) for name, path in named.items()}
    return {name: {"path": path, "revision": head} for name, (path, head) in heads.items() if head is not None}


def tell_changes(
    file: Path, settings: Mapping[str, Any], models: Mapping[str, Model], *, begun: bool, what: str
) -> dict[str, Input]:
    """Determines digests of the inputs of a command (files and models), writes them to a record, and returns them.

    If an earlier run of the command was interrupted, prints the inputs that have changed since then.

    `file`: path of the record.
    `begun`: whether an earlier run of the command has made a part of the results.
    `what`: name of the results for messages, such as "samples".
    """
    record = InputRecord(file, done=f"a part of the {what}" if begun else None, accept=True)
    inputs = read_files(settings) | read_revisions(models)
    for change in record.compare(FILES, inputs):
        print(f"changed since {what} were made, which are made again: {change}", file=sys.stderr, flush=True)
    return inputs


class InputRecord:
    """The record of a run's inputs in a file. Only the driver rank uses the record.

    `file`: path of the record. `done`: the part of the run that is done, such as "12 iterations", or None if nothing is
    done. `accept`: whether all changes of inputs are accepted.

    If a part of the run is done, the inputs are compared with the recorded inputs. A damaged record is an error, unless
    `accept` is set. Changed data, models, templates or
    prompts are an error, unless `accept` is set. Changed code, such as a corrected reward function, is always accepted
    and reported. Accepted changes are recorded together with `done`.
    """

    def __init__(self, file: Path, *, done: str | None, accept: bool) -> None:
        self._file, self._done, self._accept = file, done, accept
        self._told: dict[str, Any] = {}
        self.inputs: dict[str, Input] = {}  # all inputs that were passed to `compare`
        if done is not None and file.exists():
            self._told = self._read()
        elif done is not None:
            _log.warning("%s is not there: what was read before cannot be compared with what is read now", file)

    def _read(self) -> dict[str, Any]:
        """Returns the content of the record. If the record is damaged, raises RunError, or, if all changes are
        accepted, logs a warning and returns {}."""
        try:
            record = read_json(self._file)
            inputs = [entry for section in (record[FILES], record.get(LATER, {})) for entry in section.values()]
            paths = [entry["path"] for entry in inputs if isinstance(entry, dict) and "path" in entry]
            if len(paths) < len(inputs) or not all(path is None or isinstance(path, str | list) for path in paths):
                raise ValueError("an input has no path")
            if not isinstance(record.setdefault("changes", []), list):
                raise ValueError("its changes are no list")
            return record
        except UNREADABLE as error:
            why = f"{self._file} is damaged ({type(error).__name__}: {error}): what was read before cannot be compared "
            why += "with what is read now"
        if not self._accept:
            raise RunError(f"{why}; bring a whole copy of it, or go on without the comparison by run.resume=must")
        _log.warning("%s", why)
        return {}

    def compare(self, section: str, inputs: Mapping[str, Input]) -> list[str]:
        """Compares a section of inputs with the record, and updates the record. Returns a text for each changed input.
        Raises RunError if a change is not accepted."""
        recorded: Mapping[str, Input] = self._told.get(section, inputs)
        both = {name: _difference(recorded.get(name), inputs.get(name)) for name in sorted({*recorded, *inputs})}
        changed = {name: f"{name}{what}" for name, what in both.items() if what}
        refused = [] if self._accept else [text for name, text in changed.items() if not is_code(name)]
        if refused:
            more = f"\n  and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
            listed = "\n  ".join(refused[:SHOWN])
            raise RunError(
                f"{self._file.parent} was trained on other inputs for {self._done}:\n  {listed}{more}\n"
                "put them back, give another run.name, or go on with the new ones by run.resume=must"
            )
        new = [{"after": self._done, "changed": text} for text in changed.values()]
        self.inputs |= inputs
        self._told |= {section: inputs, "changes": self._told.get("changes", []) + new}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, self._told)
        return [*changed.values()]


def _difference(old: Input | None, new: Input | None) -> str:
    """Returns the difference of two inputs as text, such as " (rows.jsonl): bytes 20 -> 31", or "" if they are equal.
    Paths are not compared. `old`, `new`: None if the input does not exist."""
    if old is None or new is None:
        path = (new or old or {})["path"]
        return f" ({path}): {'was not there' if old is None else 'is not there any more'}"
    changes = [
        f"{key} {_short(old.get(key))} -> {_short(new[key])}"
        for key in new
        if key != "path" and old.get(key) != new[key]
    ]
    return f" ({new['path']}): {', '.join(changes)}" if changes else ""


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) else str(value)
