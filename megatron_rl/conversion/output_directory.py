"""Creates the output directory of a conversion atomically, and copies a model's side files (config and tokenizer)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from megatron_rl.config.base import ConfigError, read_object, refusing
from megatron_rl.config.model import Head
from megatron_rl.run import directory_lock
from megatron_rl.run.atomic_files import push, push_tree
from megatron_rl.text import load_tokenizer

# head -> {model_type: name of the Hugging Face `transformers` class with that head}
_CLASSES: dict[str, Mapping[str, str]] = {
    "value": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "score": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
SPARE = 1.02  # required free disk space, as a multiple of the tensors' size


@contextlib.contextmanager
def fresh(target: Path, *, wanted_bytes: int, replace: bool = False) -> Iterator[Path]:
    """Context manager that yields an empty directory, which is renamed to `target` when the block ends.

    The files are flushed to disk before the rename. If the block raises an exception, the new directory is removed. If
    the process is killed, the files are left in a directory .NAME.partial, and the next process that writes the same
    target removes them.

    `wanted_bytes`: the size of the files to be written, which must be free on the disk.
    `replace`: whether an existing directory at `target` is removed before the rename.

    Raises ConfigError if `target` exists and `replace` is False, if another process is writing `target`, if the disk
    has less than `wanted_bytes` free, or if writing fails.
    """
    if target.exists() and not replace:
        raise ConfigError(f"{target} exists: remove it, or give another place")
    partial = target.with_name(f".{target.name}.partial")
    with contextlib.ExitStack() as held:
        with refusing(lambda error: f"{target} could not be written: {error}", OSError):
            partial.mkdir(parents=True, exist_ok=True)
            lock = os.open(partial, os.O_RDONLY)
            held.callback(os.close, lock)
            name = target.with_name(f"{partial.name}.held")
            try:
                held.enter_context(directory_lock.held(lock, name, directory_lock.own_name()))
            except directory_lock.Taken as error:
                who, cure = str(error) or "another process", f"; {error.cure}" if error.cure else ""
                raise ConfigError(f"{who} is writing {target} now: wait for it, or give another place{cure}") from error
        failed = f"{target} could not be written"
        with (
            refusing(lambda error: f"{failed}: {error}; nothing was left there", OSError),
            contextlib.ExitStack() as undo,
        ):
            undo.callback(shutil.rmtree, partial, ignore_errors=True)
            for left in partial.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            free, wanted = shutil.disk_usage(partial).free, SPARE * wanted_bytes
            if free < wanted:
                raise ConfigError(
                    f"{target.parent} has {free / 1e9:.1f} GB free, the result takes up to {wanted / 1e9:.1f} GB: "
                    "choose another disk"
                )
            yield partial
            push_tree(partial)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            undo.pop_all()  # do not remove `partial` from now on, because another process may use this name
            push([target.parent])


@contextlib.contextmanager
def stoppable(target: Path) -> Iterator[None]:
    """Context manager that stops the block on SIGINT or SIGTERM. The signal raises KeyboardInterrupt in the block, so
    that the block can clean up. The context manager then raises SystemExit.

    Any exception of the block after a signal is treated as a consequence of the signal. `target`: the output directory,
    for the printed message.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        if asked:
            print(f"interrupted; nothing was left at {target}", file=sys.stderr)
            raise SystemExit(128 + asked[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def copy_side_files(source: Path, target: Path, *, keep: tuple[str, ...] = ()) -> None:
    """Copies the config, generation config and tokenizer files of the model directory `source` to `target`, except for
    files whose names are in `keep`. Removes `quantization_config` from the copied config.json, because the weights that
    are written are not quantised."""
    for pattern in ("*.json", "*.txt", "*.model", "*.jinja"):
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json") and file.name not in keep:
                shutil.copy2(file, target / file.name)
    config = read_object(source / "config.json") if "config.json" not in keep else {}
    if config.pop("quantization_config", None):
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def describe_head(folder: Path, head: Head | None) -> None:
    """Writes to a model's config.json which class of transformers loads the model with its head: a token classifier for
    a value head, or a sequence classifier for a score head. No-op without a head.

    Each of the two classes can load both kinds of heads. If transformers has no token classifier for the model's
    family, a value head is loaded as a sequence classifier too. If `pad_token_id` is missing, it is set as well,
    because a sequence classifier needs it to find the last token of padded rows.
    """
    if head is None:
        return
    file = folder / "config.json"
    config = read_object(file)
    names = [_CLASSES[kind].get(config["model_type"]) for kind in (head, "score")]
    config |= {"architectures": [name for name in names if name][:1], "num_labels": 1}
    config |= {"id2label": {"0": head}, "label2id": {head: 0}, "token_classification_bias": False}
    if config.get("pad_token_id") is None and (folder / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(folder)
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        config["pad_token_id"] = next((number for number in ids if number is not None), None)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
