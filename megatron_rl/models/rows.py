"""Defines the description of one parameter (`Row`), which is a row of a model family's parameter table.

A row holds the parameter's names in Megatron, in Hugging Face files, in transformers models and in engines, the tensors
that it is made of, and how ranks shard it. All code that handles weights uses these rows: import, export, checkpoints,
the plan of a weight sync to the engines (refit), and parameter counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.models.partitions import Partition, Source

# prefixes of the names of a layer's parameters in Megatron and in Hugging Face
MEGATRON_LAYER, HF_LAYER = "decoder.layers.{}.", "model.layers.{}."
EXPERT = "{e}"  # placeholder for the expert index in the names of a Row


@dataclass(frozen=True, kw_only=True)
class Row:
    """The description of one Megatron parameter: its names, the Hugging Face tensors that it is made of, and how ranks
    shard it. The names of a layer's parameters have no layer prefix.

    A `Row` with `experts` > 0 describes one parameter per expert. {e} in the names is replaced by the expert index.
    """

    name: str  # name in Megatron's local layer spec
    sources: tuple[Source, ...]  # Hugging Face tensors that the parameter is made of
    partition: Partition  # sharding over the trainer's tensor-parallel (for experts: expert-tensor-parallel) ranks
    # Name of the parameter in vLLM and SGLang, which stack all experts; None if engines do not have the parameter.
    # Parameters with the same engine name are concatenated.
    engine: str | None
    engine_partition: Partition | None = None  # sharding over an engine's ranks; None: as in the trainer
    fused: str | None = None  # name in Megatron's Transformer Engine layer spec; None: same as `name`
    # Name of the transformers parameter that holds the Hugging Face tensors in memory. None: the names of the tensors.
    in_memory: str | None = None
    experts: int = 0  # number of experts of the layer; 0 if the parameter does not belong to an expert
    # True if the Hugging Face files also store all experts in one tensor [experts, columns, rows], named `in_memory`
    stacked: bool = False
    copy: bool = False  # True for a copy of another parameter: the output layer of a tied model
    # True if the parameter is untrained and always float32, also in files and engines, whatever the model's dtype
    float32: bool = False

    def spelled(self, fused: bool) -> str:
        """Returns the parameter's name in Megatron's Transformer Engine layer spec if `fused` is True, otherwise its
        name in Megatron's local layer spec."""
        return self.fused if fused and self.fused is not None else self.name

    @property
    def of_engine(self) -> Partition:
        """Returns how an engine's ranks shard the parameter."""
        return self.partition if self.engine_partition is None else self.engine_partition


class OuterRows(NamedTuple):
    """The parameters outside of the layers, as `Row`s with full names. `first` has the parameters of the first pipeline
    stage, and `last` has the parameters of the last stage."""

    first: Sequence[Row]
    last: Sequence[Row]
