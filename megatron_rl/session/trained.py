"""Exports trained models to Hugging Face directories, tensor by tensor, while all ranks stream their weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megatron_rl.config.schema import ConfigError, Model
from megatron_rl.megatron.export import WeightExport
from megatron_rl.messages.world import World
from megatron_rl.run import file_checksums, json_lines
from megatron_rl.session.output_directory import copy_side_files, describe_head, fresh
from megatron_rl.spec.model_gate import LoadedModel, check_model
from megatron_rl.weights import hf_model
from megatron_rl.weights.hf_writer import SHARD_BYTES, HfWriter


def export_model(
    world: World, export: WeightExport, model: Model, target: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Exports a trained role to a Hugging Face directory with sharded weights, config, tokenizer, and the chat template
    used in training.

    `world`: the ranks of the role. Its leader writes each gathered tensor to disk at once, so that no rank holds more
    than one whole tensor. An existing directory at `target` is replaced once the new one is completely on disk.
    Collective. Raises json_lines.DiskError on every rank if the leader cannot write the files.
    """
    stream = export.weights(everywhere=False)
    failure: OSError | ConfigError | None = None
    if world.rank == 0:
        try:
            _write(stream, export, model, target, shard_bytes)
        except (OSError, ConfigError) as error:
            failure = error
    for _ in stream:  # iterate to the end even after a failure, because `weights` is a collective of all ranks
        pass

    def raise_failure() -> None:
        if failure is not None:
            free = shutil.disk_usage(target.parent).free
            raise json_lines.DiskError(
                f"the trained model cannot be written to {target}, where {free / 1e9:.1f} GB are free ({failure}); its "
                f"weights are safe in the last checkpoint: {json_lines.RESUME}"
            ) from failure

    world.from_leader(raise_failure)


def _write(
    tensors: Iterable[tuple[str, Tensor]], export: WeightExport, model: Model, target: Path, shard_bytes: int
) -> None:
    planned = export.planned()
    with fresh(target, wanted_bytes=sum(tensor.nbytes for tensor in planned), replace=True) as folder:
        HfWriter(folder, planned, shard_bytes=shard_bytes).write_all(tensors)
        file_checksums.write_sums(folder)
        copy_side_files(hf_model.local_directory(model.path), folder)
        if model.tokenizer:
            copy_side_files(hf_model.local_directory(model.tokenizer), folder, keep=("config.json",))
        if model.chat_template:
            shutil.copyfile(model.chat_template, folder / "chat_template.jinja")
        describe_head(folder, export.head)
        # Each command checks a model before it loads it. The same check here keeps a run from ending with a model that
        # the commands refuse.
        check_model(LoadedModel(model=Model(path=str(folder)), head=export.head))
