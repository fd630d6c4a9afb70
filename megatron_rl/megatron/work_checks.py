"""Rejects training work with expert or token ids that the model does not have, which would give wrong results."""

from __future__ import annotations

from megatron_rl.batches.packed_batch import CANDIDATES
from megatron_rl.batches.replica_batch import Work
from megatron_rl.weights.hf_model import Architecture


def check(work: Work, arch: Architecture, path: str) -> None:
    """Raises ValueError if token or expert ids in `work` (the sequences to process) are out of range for the model at
    `path`, for example because another model's engine or tokenizer produced them.

    Without the check, tensor-parallel ranks with a split embedding would each assume that another rank has the
    embedding of an unknown token, and the embedding would be zeros.
    """
    flat, candidates, experts = work.flat, work.flat.values.get(CANDIDATES), work.flat.experts
    rows = (
        f", and the embedding of {path} has {arch.vocab} rows: a tokenizer, or an engine, of another model wrote them"
    )
    names = f"; {path} has {arch.vocab} tokens: the teacher, or whoever names them, must have this model's vocabulary"
    for what, tokens, wrong in (("the rollouts", flat.tokens, rows), (f"values {CANDIDATES!r}", candidates, names)):
        if tokens is not None and tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < arch.vocab:
            raise ValueError(f"{what} hold tokens {tokens.min()} to {tokens.max()}{wrong}")
    if experts is None:
        return
    expected = arch.num_layers, arch.features.experts_per_token
    highest = int(experts.max()) if experts.size else 0
    if experts.shape[1:] != expected or highest >= arch.experts:
        raise ValueError(
            f"the engine chose {experts.shape[2]} experts in each of {experts.shape[1]} layers, numbers up to "
            f"{highest}; {path} has {expected[1]} of {arch.experts} in {expected[0]}: another model"
        )
