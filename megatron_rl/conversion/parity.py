"""Computes the references for converted models: logits of Megatron and of transformers, and weights merged by peft."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_rl.batches.packed_batch import pack
from megatron_rl.config.model import Head
from megatron_rl.config.schema import Layout, Model, RoleConfig
from megatron_rl.megatron import parallel, pipeline_pass
from megatron_rl.megatron.attention import RotaryTable
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.models.sizes import Sizes
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of
from megatron_rl.weights.parameter_mapping import hf_shapes
from megatron_rl.weights.tensor_copies import by_expert

POSITIONS = 8
BYTES_PER_PARAMETER = 8  # memory per parameter for the Megatron model and the transformers model together, in float32


def obstacle(sizes: Sizes) -> str | None:
    """Returns the reason why a model's logits in Megatron and in transformers cannot be compared in this process (for
    example, too little memory), or None if they can be compared."""
    if dist.is_initialized():
        return "this process is a rank of something else"
    needed = BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in hf_shapes(sizes).values())
    if needed > (free := psutil.virtual_memory().available):
        return f"both models take {needed / 1e9:.1f} GB in float32, {free / 1e9:.1f} GB of memory are free"
    return None


def logits_gap(checkpoint: Path, model: Path, head: Head | None = None) -> tuple[float, float]:
    """Compares the logits of a checkpoint in Megatron with the logits of a Hugging Face directory in transformers, for
    one sequence of POSITIONS tokens. Returns (largest absolute difference of two logits, largest absolute logit). With
    `head`, the outputs of the model's head are compared instead.

    Megatron-core loads the checkpoint and transformers loads the directory, both in float32, one after the other in
    this process.
    """
    reference: Any = _transformers_class(head).from_pretrained(model, dtype=torch.float32)
    tokens = torch.arange(POSITIONS) * 7919 % reference.config.vocab_size
    with torch.no_grad():
        if head is None:
            theirs = reference(tokens[None]).logits[0]
        else:  # call the parts, because the whole class returns only the last token's output
            theirs = reference.score(reference.model(tokens[None]).last_hidden_state)[0]
    del reference
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = _logits(checkpoint, RoleConfig(model=Model(path=str(model)), head=head), tokens)
    finally:
        dist.destroy_process_group()
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def merged_by_peft(base: Path, adapter: Path, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Merges an adapter into a model with peft. Returns {name in the model's weight files: merged float32 tensor}."""
    from peft import PeftModel  # imported late: only this function needs peft

    model = _transformers_class(sizes.head).from_pretrained(base, dtype=torch.float32, num_labels=sizes.outputs)
    merged: Any = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
    return by_expert(merged.merge_and_unload().state_dict(), sizes)


def _transformers_class(head: Head | None) -> Any:
    """Returns the class of transformers for language models, or for models with a head."""
    return AutoModelForCausalLM if head is None else AutoModelForSequenceClassification


def _logits(checkpoint: Path, role: RoleConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits [POSITIONS, vocabulary] of the Megatron model that is loaded from `checkpoint`, or the outputs
    [POSITIONS, 1] of its head, on the CPU in float32."""
    groups = parallel.create(Layout())
    policy = MegatronPolicy(role, groups, trainable=False)
    policy.state.load(checkpoint)
    rollout = Rollout(
        role="model",
        group="0",
        tokens=tokens.numpy(),
        logprobs=np.zeros(POSITIONS),
        spans=spans_of((POSITIONS, Author.ENVIRONMENT, NO_VERSION)),
        advantages=0.0,
    )
    like = next(policy.chunks[0].parameters())
    micro = pipeline_pass.make_micro_batch(
        pack([rollout]), RotaryTable(policy.arch), cut=pipeline_pass.RankPart(), like=like
    )
    with groups.active(), torch.no_grad():
        logits = policy.chunks[0](micro.tokens, micro.positions, None, packed_seq_params=micro.layout)
    return logits[0, :, : policy.arch.outputs].float().cpu()
