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
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from megatron_rl.config.base import ConfigError, read_object, refusing
from megatron_rl.config.model import Head, Model
from megatron_rl.run import directory_lock
from megatron_rl.run.atomic_files import push, push_tree
from megatron_rl.texts.text import load_tokenizer
from megatron_rl.texts.vocabulary import padding_token, token_ids, vocabulary_of

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
            for leftover in partial.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            free, needed = shutil.disk_usage(partial).free, SPARE * wanted_bytes
            if free < needed:
                raise ConfigError(
                    f"{target.parent} has {free / 1e9:.1f} GB free, the result takes up to {needed / 1e9:.1f} GB: "
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
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        if signals:
            print(f"interrupted; nothing was left at {target}", file=sys.stderr)
            raise SystemExit(128 + signals[0]) from error
        raise
    finally:
        for number, handler in old_handlers.items():
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
        _write_object(target / "config.json", config)


def describe_head(folder: Path, head: Head | None) -> None:
    """Writes to a model's config.json which class of transformers loads the model with its head: a token classifier for
    a value head, or a sequence classifier for a score head. No-op without a head.

    Each of the two classes can load both kinds of heads. If transformers has no token classifier for the model's
    family, a value head is loaded as a sequence classifier too.

    A sequence classifier of transformers reads the score at a text's last token that is not `pad_token_id`. Texts are
    scored at their last token, so `pad_token_id` and the tokenizer's padding token are replaced if they may end a text.
    If the tokenizer has no other token for padding, `pad_token_id` is null: the classifier then reads the last token,
    and refuses several texts at once.
    """
    if head is None:
        return
    file, settings = folder / "config.json", folder / "tokenizer_config.json"
    config = read_object(file)
    names = [_CLASSES[kind].get(config["model_type"]) for kind in (head, "score")]
    config |= {"architectures": [name for name in names if name][:1], "num_labels": 1}
    config |= {"id2label": {"0": head}, "label2id": {head: 0}, "token_classification_bias": False}
    if settings.is_file():
        tokenizer = load_tokenizer(folder)
        pad = padding_token(tokenizer, vocabulary_of(Model(path=str(folder)), tokenizer))
        config["pad_token_id"] = pad
        if pad is not None:
            name = tokenizer.convert_ids_to_tokens(pad)
            for names_file in filter(Path.is_file, (settings, folder / "special_tokens_map.json")):
                _write_object(names_file, read_object(names_file) | {"pad_token": name})
    elif config.get("pad_token_id") in token_ids(folder, "eos_token_id of config.json", config.get("eos_token_id")):
        config["pad_token_id"] = None
    _write_object(file, config)


def _write_object(file: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object to a file of a model directory."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
