"""Refuses work that names experts or tokens which the model does not have: its numbers would be made up."""

from __future__ import annotations

from megatron_rl.batches.packed_batch import CANDIDATES
from megatron_rl.batches.replica_batch import Work
from megatron_rl.weights.hf_model import Architecture


def check(work: Work, arch: Architecture, path: str) -> None:
    """Raises ValueError for work that another model's engine, or another vocabulary, has made. `path`: the model's.

    Tensor ranks that cut an embedding would take a token without a row for one of another rank, and read zeros.
    """
    tokens = work.flat.tokens
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < arch.vocab:
        raise ValueError(
            f"the rollouts hold tokens {tokens.min()} to {tokens.max()}, and the embedding of {path} has {arch.vocab} "
            "rows: a tokenizer, or an engine, of another model wrote them"
        )
    _check_experts(work, arch, path)
    _check_candidates(work, arch, path)


def _check_experts(work: Work, arch: Architecture, path: str) -> None:
    if (experts := work.flat.experts) is None:
        return
    wanted = arch.num_layers, arch.features.experts_per_token
    highest = int(experts.max()) if experts.size else 0
    if experts.shape[1:] != wanted or highest >= arch.experts:
        raise ValueError(
            f"the engine chose {experts.shape[2]} experts in each of {experts.shape[1]} layers, numbers up to "
            f"{highest}; {path} has {wanted[1]} of {arch.experts} in {wanted[0]}: another model"
        )


def _check_candidates(work: Work, arch: Architecture, path: str) -> None:
    candidates = work.flat.values.get(CANDIDATES)
    if candidates is None or not candidates.size:
        return
    lowest, highest = int(candidates.min()), int(candidates.max())
    if lowest < 0 or highest >= arch.vocab:
        raise ValueError(
            f"values {CANDIDATES!r} hold tokens {lowest} to {highest}; {path} has {arch.vocab} tokens: the teacher, or "
            "whoever names them, must have this model's vocabulary"
        )
