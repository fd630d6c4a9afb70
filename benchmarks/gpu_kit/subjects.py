"""Makes what is measured: Qwen2 models of public sizes with random weights, and packed batches of random tokens."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from megatron_rl.config.schema import Layout, LossConfig, Model, Optimizer, RoleConfig
from megatron_rl.megatron import model as models
from megatron_rl.megatron import optimizer as optim
from megatron_rl.megatron import parallel
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.models import registry
from megatron_rl.types import NO_VERSION, Author, Rollout, spans_of

PUBLIC = {"0.5B": "qwen2.5-0.5b", "1.5B": "qwen2.5-1.5b", "7B": "qwen2.5-7b"}
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of everything that is measured."""

    tiny: bool = False  # every model is TINY, whatever its name
    models: tuple[str, ...] = ("1.5B", "7B", "0.5B")  # of updates, in their turn
    tokens: tuple[int, ...] = (4096, 16384)  # of a packed micro-batch
    equal: int = 1024  # tokens of a sequence, where all are equal
    longest: int = 4096  # of a sequence, where lengths vary
    rounds: int = 3
    product: int = 8192  # rows and columns of the matrices whose product is timed
    copied: int = 4 << 30  # bytes of the copy that is timed
    head: tuple[int, int, int] = (8192, 1536, 151_936)  # tokens, hidden size, vocabulary of the log-prob head
    prompt: int = 64  # tokens of a prompt
    new: int = 512  # tokens that an engine writes in each row
    rows: tuple[int, ...] = (32, 256)  # sequences that are written at once
    varied_rows: tuple[int, ...] = (256, 1024)  # sequences of varied lengths, of which rows[-1] are written at once
    refits: int = 5


FULL = Scale()
SMALL = Scale(
    tiny=True, models=("1.5B", "7B"), tokens=(64,), equal=16, longest=48, rounds=1, product=64, copied=1 << 16,
    head=(64, 32, 512), prompt=5, new=6, rows=(2, 4), varied_rows=(6,), refits=2,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What a backward pass computes again, by a name and as settings of a model."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


# From the fastest to the one that needs the least memory.
RECOMPUTES = (
    Recompute(name="none"),
    Recompute(name="mlp", settings={"recompute": "selective", "recompute_modules": ("mlp",)}),
    Recompute(name="full", settings={"recompute": "full"}),
)


def count_name(tokens: int) -> str:
    """Returns 16k for 16,384."""
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def write_config(directory: Path, name: str, scale: Scale) -> Path:
    """Writes the config.json of a model, without weights. Returns the directory."""
    public = dict(registry.known()[PUBLIC[name]])
    public.pop("model_type")
    sizes = public | (TINY if scale.tiny else {})
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = Qwen2Config(**sizes, **ends, max_position_embeddings=32768)
    config.architectures = ["Qwen2ForCausalLM"]
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    return directory


class RandomPolicy(MegatronPolicy):
    """A policy whose weights are drawn on the device: nothing is read, and nothing passes through the host."""

    def _fill(self, cores: list[models.PolicyModel], seed: int) -> None:
        torch.cuda.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in models.named_parameters(cores):
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.02)


def make_policy(
    directory: Path, *, recompute: Recompute, tokens: int, optimizer: bool, lr: float = 1e-6,
    attention: Literal["auto", "sdpa"] = "auto",
) -> RandomPolicy:  # fmt: skip
    """Returns a bfloat16 policy that is trained in packed micro-batches of `tokens`.

    Without `optimizer` it has gradient buffers alone, of which 7 B parameters and their activations fit on one GPU.
    """
    role = RoleConfig(
        model=Model(path=str(directory), dtype="bfloat16", attention_backend=attention, **recompute.settings),
        optimizer=Optimizer(lr=lr), loss=LossConfig(kl_coef=0.0), micro_batch_tokens=tokens,
    )  # fmt: skip
    policy = RandomPolicy(role, parallel.create(Layout()), trainable=optimizer)
    if not optimizer:
        with policy.groups.active():
            sums = models.uses_fused_sums(role.model)
            policy.chunks = optim.wrap(policy.config, policy.chunks, fused_sums=sums)
    return policy


def forms_of(policy: RandomPolicy) -> dict[str, str]:
    """Says which of its forms each part of a policy has here: a setting of `auto` may have found none of the fast ones
    usable, and a figure without this could not be explained."""
    triton = models.unwrap(policy.chunks[0]).triton
    return {
        "layers": "transformer_engine" if policy.fused else "torch",
        "attention": "transformer_engine" if policy.fused else "flash" if policy._flash else "sdpa",
        "log_probs": "triton" if triton else "torch",
        "gates_and_rotary": "transformer_engine" if policy.fused else "triton" if triton else "torch",
        "sums_of_gradients": "in products" if models.uses_fused_sums(policy.role.model) else "apart",
    }


def transformers_model(directory: Path) -> PreTrainedModel:
    """Returns transformers' model of a directory's config in bfloat16, with weights that are drawn on the device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config.from_pretrained(directory), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.to_empty(device="cuda")
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    # Its table of angles is no weight: it was left without numbers.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to("cuda")
    return model


def lengths_of(kind: str, tokens: int, scale: Scale, seed: int = 0) -> list[int]:
    """Returns lengths of sequences that have `tokens` tokens together: all `equal`, or `varied` as rollouts' are."""
    if kind == "equal":
        return [scale.equal] * (tokens // scale.equal)
    draw, remaining, lengths = random.Random(seed), tokens, []
    while remaining:
        n = round(draw.lognormvariate(math.log(scale.longest / 6), 0.8))
        n = min(max(n, scale.longest // 64, 2), scale.longest, remaining)
        n = remaining if remaining - n < 2 else n
        lengths.append(n)
        remaining -= n
    return lengths


def rollouts_of(lengths: list[int], vocab: int, seed: int = 0) -> list[Rollout]:
    """Returns sequences of random tokens. All but the first of each are trained, so that nothing is left out of the
    output layer."""
    draw = np.random.default_rng(seed)
    return [
        Rollout(
            role="model", group=str(i), tokens=draw.integers(0, vocab, n), logprobs=np.zeros(n, np.float32),
            spans=spans_of((1, Author.ENVIRONMENT, NO_VERSION), (n - 1, Author.POLICY, 0)), advantages=1.0,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


@contextlib.contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Lets torch take cuDNN's attention for the block, or not, as a run does not (session/run_setup.py)."""
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Makes this process the only rank for the block, with the settings of a run (session/run_setup.py)."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with cudnn_attention(False):
            yield
    finally:
        dist.destroy_process_group()
