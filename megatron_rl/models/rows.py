"""Describes one parameter in all of its forms: a row of a family's table.

A row says under which names Megatron, Hugging Face files, transformers in memory and engines know a parameter, which
tensors it is made of, and how ranks cut it. Everything that the package does with weights reads these rows: import,
export, checkpoints, the plan of a refit, counts of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.models.partitions import Partition, Source

MEGATRON_LAYER, HF_LAYER = "decoder.layers.{}.", "model.layers.{}."  # what names of layers' parameters begin with
EXPERT = "{e}"  # stands for an expert's number in the names of a row


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of Megatron; within a layer its names are without the layer's prefix.

    A row of `experts` stands for as many parameters: {e} in its names is the number of the expert.
    """

    name: str  # Megatron's, as core's local layer spec spells it
    sources: tuple[Source, ...]  # Hugging Face tensors that the parameter is made of
    partition: Partition  # how tensor-parallel ranks of the trainer cut it; of an expert, expert-tensor-parallel ones
    # vLLM's and SGLang's parameter, which stacks all experts; None: they hold none for this row. Rows of one name stand
    # end to end in it.
    engine: str | None
    engine_partition: Partition | None = None  # how an engine's ranks cut it; None: as the trainer's do
    fused: str | None = None  # Megatron's name in Transformer Engine's layer spec; None: `name`
    in_memory: str | None = None  # the parameter of a transformers model that holds the sources; None: their own names
    experts: int = 0  # experts of the layer; 0: the parameter belongs to none
    copy: bool = False  # another row's tensor, kept again: the output layer of a tied model
    float32: bool = False  # it is float32 whatever the model's dtype, in files and engines too, and is not trained

    def spelled(self, fused: bool) -> str:
        """Returns Megatron's name in the spelling of Transformer Engine (`fused`) or of the local layer spec."""
        return self.fused if fused and self.fused is not None else self.name

    @property
    def of_engine(self) -> Partition:
        """Returns how an engine's ranks cut the parameter."""
        return self.partition if self.engine_partition is None else self.engine_partition


class OuterRows(NamedTuple):
    """The rows outside of the layers, with whole names: those of the first pipeline stage, and those of the last."""

    first: Sequence[Row]
    last: Sequence[Row]
