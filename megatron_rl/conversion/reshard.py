"""Reshards a checkpoint (model and optimizer) for another layout, one parameter at a time, without distributed ranks.

Megatron-core can load a checkpoint under any layout, but it loads faster if the checkpoint was written for the reader's
layout. Every rank then has a separate file and reads nothing else. For comparison, a rank of tp 8 reads eight times its
share of a checkpoint written with tp 1. Resharding also checks what Megatron-core does not check: that every tensor is
known and has the model's shape, and that the optimizer state matches the weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from megatron_rl.config.base import ConfigError, refuse
from megatron_rl.config.model import Layout
from megatron_rl.conversion.convert import OF_CHECKPOINTS
from megatron_rl.conversion.dist_writer import DistWriter
from megatron_rl.conversion.weight_source import WeightSource, find, iteration_directory, roles
from megatron_rl.models.blocks import OUTPUT, VALUE_HEAD
from megatron_rl.models.divisibility import trainer_problems
from megatron_rl.models.sizes import Sizes
from megatron_rl.run.checkpoint import STATE, seal
from megatron_rl.session.output_directory import copy_side_files, fresh
from megatron_rl.weights import rank_layouts, tensor_copies
from megatron_rl.weights.dist_checkpoint import DistCheckpoint
from megatron_rl.weights.dist_names import OPTIMIZER, Piece, counts, is_padded, pieces, spellings, stored_shape
from megatron_rl.weights.parameter_mapping import WHOLE, Shard, kept_float32, megatron
from megatron_rl.weights.rank_layouts import TrainerLayout

# prefix of the names under which a checkpoint stores the optimizer's float32 copies of the weights
MASTER = OPTIMIZER + "param."
# name of a parameter -> [(rank that writes the piece, piece of the parameter)]
Cuts = dict[str, list[tuple[int, Piece]]]


def reshard(
    path: Path, target: Path, layout: TrainerLayout, *, experts: TrainerLayout | None = None,
    role: str | None = None, model: Path | None = None, trust: bool = False,
) -> list[Path]:  # fmt: skip
    """Copies a checkpoint to `target`, sharded for another parallel layout. Copies one role's directory if `role` is
    given or `path` is a role's directory, otherwise the whole checkpoint.

    A whole checkpoint consists of all roles and the state of the run. The directory name of `target` must then be the
    name of the source checkpoint (iteration_N), so that a run can resume from the copy.

    `layout`: the parallel layout to shard for.
    `experts`: the parallel layout for models with experts; None: the same as `layout`.
    `model`: the directory with config.json and tokenizer; None: the directory named by the run's config.yaml.
    `trust`: whether pickled parts of the checkpoint may run code when they are loaded.

    Returns the role directories that were read. Raises ConfigError if the checkpoint is missing or damaged, if the
    model cannot be sharded for the layout, or if `target` cannot be written.
    """
    path = Path(path)
    if role is not None or (path / ".metadata").is_file() or not path.is_dir():
        source = find(path, role=role, model=model, trust=trust)
        with fresh(target, wanted_bytes=_bytes(source)) as folder:
            _recut(source, layout, experts, folder)
        return [source.path]
    checkpoint = iteration_directory(path)
    names = roles(checkpoint)
    if not (checkpoint / STATE).is_file() or not names:
        raise ConfigError(f"{path} is no run and no checkpoint of one: give iteration_N, or a role's directory in it")
    if target.name != checkpoint.name:
        raise ConfigError(
            f"{target}: call it {checkpoint.name}, like the checkpoint it is made of, so that a run finds it; "
            "or name a --role"
        )
    sources = [find(checkpoint, role=name, model=model, trust=trust) for name in names]
    with fresh(target, wanted_bytes=sum(map(_bytes, sources))) as folder:
        for source in sources:
            (folder / source.path.name).mkdir()
            _recut(source, layout, experts, folder / source.path.name)
        shutil.copy2(checkpoint / STATE, folder / STATE)
        seal(folder, int(checkpoint.name.removeprefix("iteration_")))
    return [source.path for source in sources]


def _bytes(source: WeightSource) -> int:
    """Returns the size of a checkpoint's files in bytes."""
    return sum(file.stat().st_size for file in source.path.glob("*.distcp"))


def _recut(source: WeightSource, dense: TrainerLayout, experts: TrainerLayout | None, folder: Path) -> None:
    checkpoint, sizes = source.checkpoint, source.sizes
    if source.adapter is not None:
        raise ConfigError(
            f"{source.adapter.parent} holds adapters alone, which any layout reads as quickly: leave it as it is"
        )
    layout = experts if experts is not None and sizes.experts else dense
    if checkpoint is None:
        raise ConfigError(
            f"{source.path} is a Hugging Face directory, which has no layout: make a checkpoint by to-megatron"
        )
    etp = layout.etp if sizes.experts or layout.etp > 1 else None
    checked = Layout(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=etp, sequence_parallel=layout.tp > 1)
    problems = trainer_problems(sizes, checked, str(source.model))
    refuse(*(f"no run reads such a checkpoint: {line}" for line in problems))
    cuts, extra, constant = _cuts(sizes, layout), set(checkpoint.shapes), kept_float32(sizes)
    with DistWriter(folder) as writer:
        for name in track(cuts, description="parameters", transient=True):
            weight: Tensor | None = None
            for prefix in ("", *(() if name in constant else checkpoint.optimizer_states)):
                tensor = checkpoint.checked(sizes, name, prefix)
                extra -= {checkpoint.place(name, prefix).key, *(prefix + place.key for place in spellings(sizes, name))}
                weight = tensor if prefix == "" else weight
                if prefix == MASTER and weight is not None:
                    _check_master(checkpoint, sizes, name, weight, tensor)
                _write(writer, sizes, layout.tp, (prefix, name, cuts[name]), tensor)
        for key in sorted(key for key in extra if key.endswith(VALUE_HEAD)):  # not a parameter of the family
            prefix = key.removesuffix(VALUE_HEAD)
            tensor, last = checkpoint.parameter(VALUE_HEAD, prefix), max(at for cut in cuts.values() for at, _ in cut)
            writer.add(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor, rank=last)
            extra.remove(key)
        if extra:
            raise ConfigError(
                f"{checkpoint.directory} holds {sorted(extra)[0]}, for which a {sizes.family} model has no place"
            )
        for key, data in checkpoint.objects():
            writer.add_bytes(key, data)
        copy_side_files(source.model, folder, keep=OF_CHECKPOINTS)
        writer.finish(checkpoint.common())


def _cuts(sizes: Sizes, layout: TrainerLayout) -> Cuts:
    """Returns the pieces into which `layout` splits every parameter, each with the lowest rank that holds the piece."""
    cuts: Cuts = {}
    for holding in rank_layouts.trainer(sizes, layout):
        rank = holding.ranks[0]
        for name in dict.fromkeys(name for name, _ in holding.parameters):
            if name == OUTPUT and sizes.tied:
                continue  # the output layer of a tied model is a copy of the embedding and is not stored
            expert = ".experts." in name
            position = rank % (layout.ep * layout.etp) % layout.etp if expert else rank % layout.tp
            shard = Shard(expert_tp=layout.etp, expert_rank=position) if expert else Shard(layout.tp, position)
            held = cuts.setdefault(name, [])
            held += [(rank, piece) for piece in pieces(sizes, name, shard) if piece not in [p for _, p in held]]
    return cuts


def _write(
    writer: DistWriter, sizes: Sizes, tp: int, what: tuple[str, str, list[tuple[int, Piece]]], tensor: Tensor
) -> None:
    """Writes the pieces of `tensor`, with vocabulary padding. `what`: (prefix, name of the parameter,
    pieces). The prefix names the optimizer state that is written; "" means the weight itself."""
    prefix, name, cuts = what
    matrix = tensor if tensor.dim() > 1 else tensor[:, None]
    shape = stored_shape(sizes, name, tp)
    rows = megatron(sizes, name, WHOLE)[0][0]
    for rank, piece in cuts:
        part = matrix[piece.row : min(rows, piece.row + piece.rows), piece.column : piece.column + piece.columns]
        if is_padded(sizes, name) and len(part) < piece.rows:
            part = torch.cat([part, part.new_zeros(piece.rows - len(part), piece.columns)])
        part = part if tensor.dim() > 1 else part[:, 0]
        size, offsets = shape[: tensor.dim()], (piece.row, piece.column)[: tensor.dim()]
        for place in spellings(sizes, name):
            stacked = part[(None,) * len(place.at)]
            writer.add(prefix + place.key, (*counts(sizes, place), *size), (*place.at, *offsets), stacked, rank=rank)


def _check_master(checkpoint: DistCheckpoint, sizes: Sizes, name: str, weight: Tensor, master: Tensor) -> None:
    """Raises ConfigError if the optimizer's float32 copy `master` of a parameter, rounded to the dtype of `weight`, is
    not equal to `weight`."""
    rows = megatron(sizes, name, WHOLE)[0][0]
    if not all(
        torch.equal(a, b.to(a.dtype))
        for a, b in zip(tensor_copies.blocks(weight[:rows]), tensor_copies.blocks(master[:rows]), strict=True)
    ):
        raise ConfigError(
            f"{checkpoint.directory}: the optimizer's own copy of {name} is not the weight: "
            "its state cannot be trusted. `convert to-hf` takes the weights alone, for a run that starts from them"
        )
