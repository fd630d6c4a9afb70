"""Describes one parameter in all of its forms: a row of a family's parameter table.

A row holds the parameter's names in Megatron, in Hugging Face files, in transformers models and in engines, the tensors
that it is made of, and how ranks shard it. All code that handles weights uses these rows: import, export, checkpoints,
the plan of a weight sync to the engines (refit), and parameter counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.models.partitions import Partition, Source

MEGATRON_LAYER, HF_LAYER = "decoder.layers.{}.", "model.layers.{}."  # prefixes of the names of a layer's parameters
EXPERT = "{e}"  # placeholder for the expert index in the names of a row


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of Megatron. The names of a layer's parameters have no layer prefix.

    A `Row` with `experts` > 0 describes one parameter per expert. {e} in its names is replaced by the expert index.
    """

    name: str  # name in Megatron's local layer spec
    sources: tuple[Source, ...]  # Hugging Face tensors that the parameter is made of
    partition: Partition  # how the trainer's tensor-parallel ranks (for experts, expert-tensor-parallel ranks) shard it
    # Name of the parameter in vLLM and SGLang, where all experts are stacked; None if engines do not have it. Rows with
    # the same engine name are concatenated.
    engine: str | None
    engine_partition: Partition | None = None  # how an engine's ranks shard it; None: like the trainer
    fused: str | None = None  # name in Megatron's Transformer Engine layer spec; None: `name`
    # name of the parameter of a transformers model that holds the sources; None: the sources' names
    in_memory: str | None = None
    experts: int = 0  # number of experts of the layer; 0 if the parameter is not an expert's
    copy: bool = False  # whether it is a copy of another row's tensor: the output layer of a tied model
    # whether it is untrained and always float32, also in files and engines, whatever the model's dtype
    float32: bool = False

    def spelled(self, fused: bool) -> str:
        """Returns Megatron's name in the Transformer Engine layer spec if `fused` is True, otherwise in the local layer
        spec."""
        return self.fused if fused and self.fused is not None else self.name

    @property
    def of_engine(self) -> Partition:
        """Returns how an engine's ranks shard the parameter."""
        return self.partition if self.engine_partition is None else self.engine_partition


class OuterRows(NamedTuple):
    """The rows outside of the layers, with full names: those of the first and those of the last pipeline stage."""

    first: Sequence[Row]
    last: Sequence[Row]
