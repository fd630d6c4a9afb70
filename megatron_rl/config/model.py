"""Settings of one trained model: where it comes from, how it lies over the ranks, its optimizer, loss and sampling."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError, Share, config
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engines import EndpointConfig

# algorithms/tandem_authors.py explains each
Strategy = Literal["bernoulli", "alternating", "chunk", "sentence", "word"]
# Names of the matrices that an adapter may change, as Hugging Face and peft have them.
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


MOST_RANKS = 1 << 16  # of one axis of a layout


@config
class Layout:
    """The way one role's model lies over the ranks. The data-parallel size is what remains: ranks / (tp x cp x pp)."""

    tp: int = 1  # number of tensor-parallel ranks
    pp: int = 1  # number of pipeline stages
    cp: int = 1  # number of context-parallel ranks; each holds its share of every sequence's tokens
    vpp: int | None = None  # virtual pipeline stages on each rank (interleaved schedule); null: not interleaved
    # Number of expert-parallel ranks; each holds its share of a layer's experts. They are taken from the tp x cp x dp
    # ranks of a stage.
    ep: int = 1
    # Number of tensor-parallel ranks of each expert; null: as many as tp, so that tp alone shards the whole model.
    etp: int | None = None
    sequence_parallel: bool = False  # shard norms and residuals along the sequence; needs tp above 1
    overlap_p2p: bool = False  # overlap pipeline sends with computation; vpp needs it

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.expert_tp}
        for name, number in sizes.items():
            if not 1 <= number <= MOST_RANKS:
                raise ConfigError(f"layout.{name} = {number}: give a number of ranks, from 1 to {MOST_RANKS}")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "layout.sequence_parallel = true with layout.tp = 1: set tp above 1 or sequence_parallel to false"
            )
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise ConfigError(
                f"layout.vpp = {self.vpp} with layout.pp = {self.pp}: both must be at least 2, or vpp null"
            )
        if self.vpp is not None and not self.overlap_p2p:
            raise ConfigError(
                f"layout.vpp = {self.vpp} with layout.overlap_p2p = false gives wrong gradients in Megatron-core "
                "without an error: set layout.overlap_p2p=true"
            )

    @property
    def model_ranks(self) -> int:
        """Returns the number of ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def expert_tp(self) -> int:
        """Returns the number of tensor-parallel ranks of each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_ranks(self) -> int:
        """Returns the number of ranks that hold all experts once, over all pipeline stages."""
        return self.expert_tp * self.ep * self.pp


@config
class Model:
    """A model's files, and how it is built from them."""

    # A Hugging Face model directory or hub name: config.json, tokenizer, and safetensors when init is pretrained.
    path: str
    tokenizer: str | None = None  # another tokenizer directory; null: `path`
    chat_template: str | None = None  # file with a Jinja chat template; null: the tokenizer's own
    # pretrained: load the weights from `path`. random: draw them from the seed.
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["float32", "bfloat16"] = "float32"  # number format of weights and activations
    # Which activations are computed again in the backward pass instead of kept in memory. selective: those of
    # recompute_modules.
    recompute: Literal["none", "selective", "full"] = "none"
    # Parts of a layer that recompute = selective computes again.
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = ("core_attn",)
    # Attention of packed rows, where layers are not Transformer Engine's. flash: torch's flash attention for variable
    # lengths, one call for all sequences; it needs a GPU, bfloat16, and heads of a multiple of 8 elements, 256 at most.
    # sdpa: a call for each group of sequences of similar length. auto: flash where it can be had.
    attention_backend: Literal["auto", "flash", "sdpa"] = "auto"
    # Kernels of log-probs, gates and rotary embedding, and of sums of gradients on a GPU. triton: this project's own,
    # which need a GPU and Triton, and are tried against torch's operations first. torch: torch's operations. auto:
    # triton where it can be had on all ranks.
    kernels: Literal["auto", "triton", "torch"] = "auto"
    # Weight of the load-balancing loss of experts (as in Switch Transformer, computed per micro-batch); 0: none.
    router_aux_loss: NonNegativeFloat = 0.0
    # Compute matrix products in 8 bits by Transformer Engine; needs a GPU with 8-bit floats (H100 or later, not A100).
    fp8: bool = False


@config
class Optimizer:
    """Adam with decoupled weight decay. The rate warms up linearly, then it is constant or falls to `min_lr`."""

    lr: NonNegativeFloat = 1e-6  # learning rate after the warm-up
    min_lr: NonNegativeFloat = 0.0  # learning rate at the end of a decay; exponential needs it above 0
    betas: tuple[Share, Share] = (0.9, 0.999)  # Adam's decay rates of the first and second moment
    eps: PositiveFloat = 1e-8  # Adam's small number in the denominator
    weight_decay: NonNegativeFloat = 0.01  # coefficient of the decoupled weight decay
    decay_norms: bool = False  # true: weight decay acts on norms and biases, too, as torch's AdamW has it by default
    clip_grad: NonNegativeFloat = 1.0  # largest global gradient norm; 0: no clipping
    warmup_steps: NonNegativeInt = 0  # optimizer steps over which the rate rises from 0 to lr
    # Shape of the rate after the warm-up. exponential: every step lowers it by the same factor.
    decay: Literal["constant", "linear", "cosine", "exponential"] = "constant"
    # Optimizer steps until the rate is min_lr, warm-up included. Every decay needs it.
    decay_steps: PositiveInt | None = None
    # Sum gradients over replicas during the last backward pass, and gather new weights during the next forward pass of
    # the same update, instead of after each.
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.decay != "constant" and self.decay_steps is None:
            raise ConfigError(
                f"optimizer.decay = {self.decay!r} needs optimizer.decay_steps: the step at which min_lr is reached"
            )
        if self.decay != "constant" and self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"optimizer.decay_steps = {self.decay_steps} is within warmup_steps = {self.warmup_steps}: raise it"
            )
        if self.decay == "exponential" and self.min_lr == 0:
            raise ConfigError(
                "optimizer.decay = 'exponential' with optimizer.min_lr = 0.0: a constant factor never reaches 0; give "
                "the rate at which the run ends, such as a tenth or a hundredth of lr"
            )
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optimizer.min_lr = {self.min_lr} is above optimizer.lr = {self.lr}: the rate falls to it"
            )


@config
class CorrectionConfig:
    """Weights for tokens by the ratio r = p_old / p_engine between trainer and engine (algorithms/corrections.py).

    `low` and `high` are the bounds of r, or of what `level` makes of it; a bound that is null does not bind. TIS:
    {kind: truncate, high: 2.0}. IcePop: {kind: mask, low: 0.5, high: 5.0}. MIS: {kind: mask, level: sequence,
    high: 3.0}. Geometric rejection: {kind: drop, level: geometric, low: 0.999, high: 1.001}.
    """

    # truncate: the weight is r, moved into the bounds. mask: it is r, and 0 outside the bounds. drop: it is 1, and 0
    # outside the bounds. none: it is 1, whatever rollouts.max_staleness is.
    kind: Literal["none", "truncate", "mask", "drop"]
    # token: r of the token itself. sequence: product of r over the trained tokens of a rollout. geometric: geometric
    # mean of r over them.
    level: Literal["token", "sequence", "geometric"] = "token"
    low: NonNegativeFloat | None = None  # lower bound, at most 1
    high: PositiveFloat | None = None  # upper bound, at least 1

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        if self.kind == "none":
            if self.level != "token" or (low, high) != (None, None):
                raise ConfigError(
                    f"correction.kind = 'none' with level = {self.level!r}, low = {low}, high = {high}: nothing is "
                    "weighed; leave these out, or choose another kind"
                )
            return
        if low is None and high is None:
            raise ConfigError(f"correction.kind = {self.kind!r} without bounds: set correction.low, high or both")
        if not (low or 0.0) <= 1 <= (1 if high is None else high):
            raise ConfigError(
                f"correction.low = {low}, high = {high}: trainer and engine that agree have the ratio 1, which must "
                "lie within the bounds; set low to at most 1 and high to at least 1"
            )


# The correction of roles that name none, where rollouts are collected ahead of training (rollouts.max_staleness above
# 0).
CORRECTION_AHEAD = CorrectionConfig(kind="truncate", high=2.0)


@config
class LossConfig:
    """The policy loss: an objective + kl_coef * KL(policy || reference) - entropy_coef * entropy."""

    # Loss of each token: clipped, gspo, gmpo, cispo, sapo, vespo, reinforce, rover, distilled, distilled_top_k,
    # rl_plus, or module:name (see algorithms/objectives.py).
    objective: str = "clipped"
    objective_args: dict[str, Any] = field(default_factory=dict)  # arguments of the objective, by name
    clip_low: NonNegativeFloat = 0.2  # clipped: ratios of new to old probability below 1 - clip_low are clipped
    clip_high: NonNegativeFloat = 0.2  # clipped: ratios of new to old probability above 1 + clip_high are clipped
    kl_coef: NonNegativeFloat = 0.001  # weight of the KL penalty towards the reference model; 0: no reference is kept
    # Estimator of that KL per token (Schulman). k1: log-ratio. k2: half its square. k3: unbiased, low variance, never
    # negative.
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_clamp: PositiveFloat | None = None  # largest k3 of a token, beyond which it has no gradient; null: none
    # Multiply a token's KL by the ratio p / p_old, through which the gradient flows too. The gradient is then that of
    # the KL, also where an older policy wrote the rollouts (DeepSeek-V3.2).
    kl_bias_correction: bool = False
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # token_mean: every trained token counts the same. sequence_mean: every sequence counts the same. prompt_mean: every
    # prompt counts the same, and within it every token. constant: the sum over tokens is divided by the number of
    # sequences times max_tokens (Dr.GRPO).
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    max_tokens: PositiveInt | None = None  # tokens of a sequence for aggregation = constant; null: sampling.max_tokens
    # Weights against the difference between trainer and engine. null: none, or {kind: truncate, high: 2.0} where
    # rollouts.max_staleness is above 0.
    correction: CorrectionConfig | None = None
    # Leave tokens of negative advantage out of the objective where the mean of log p_engine - log p over their rollout
    # is above this (DeepSeek-V3.2's mask of off-policy sequences); null: no mask.
    off_policy_mask: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.kl_clamp is not None and self.kl != "k3":
            raise ConfigError(
                f"loss.kl_clamp = {self.kl_clamp} with loss.kl = {self.kl!r}: it clamps k3 alone; unset it"
            )
        if self.objective != "clipped" and (self.clip_low, self.clip_high) != (0.2, 0.2):
            raise ConfigError(
                f"loss.clip_low = {self.clip_low}, clip_high = {self.clip_high} with loss.objective = "
                f"{self.objective!r}: they are read by clipped alone; give them in loss.objective_args"
            )


@config
class SamplingConfig:
    """The way one role's rollouts are drawn. The number of samples and the seed come from the recipe."""

    max_tokens: PositiveInt = 2048  # longest completion, in tokens
    temperature: NonNegativeFloat = 1.0  # 0: always the likeliest token
    # Draw among the likeliest tokens that have this total probability; 1: all.
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0  # draw among this many likeliest tokens; 0: all
    min_p: Share = 0.0  # leave out tokens less likely than this share of the likeliest one's probability
    stop_strings: tuple[str, ...] = ()  # texts that end a completion


@config
class TandemConfig:
    """Two models that write the rollouts together: a frozen junior, and the role itself as the senior (docs/tandem.md).

    The senior is trained on its own tokens.
    """

    # The junior's model directory or hub name, with the same vocabulary; null: the model that the role starts from
    # (model.path).
    junior: str | None = None
    strategy: Strategy = "word"  # rule by which the author of the next token changes
    p: Share = 0.5  # probability that a draw makes the senior the author (strategies bernoulli and word)
    max_gap: PositiveInt = 32  # the author is drawn anew after this many tokens without a new word (strategy word)
    chunk_size: PositiveInt = 16  # tokens that one author writes in a row (strategy chunk)
    junior_weight: Share = 0.0  # weight of the junior's tokens in the senior's loss; the paper's runs use 0


@config
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685) that are trained in place of the model's own weights.

    A matrix W computes as W + (alpha / rank) B A. W stays as it is (docs/lora.md).
    """

    rank: PositiveInt = 16  # r: rows of A and columns of B
    alpha: PositiveFloat = 32.0  # the product B A is multiplied by alpha / rank
    # The matrices that get an adapter, by their Hugging Face names. Of a model with experts only those of the attention
    # can: q_proj, k_proj, v_proj and o_proj.
    targets: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # The way in which A is drawn from the seed; B is zero, so that training starts from the model itself. kaiming:
    # uniform within 1 / sqrt(columns of W), peft's default. gaussian: normal, of the standard deviation 1 / rank.
    init: Literal["kaiming", "gaussian"] = "kaiming"
    # Directory of an adapter, as peft writes it, that training starts from; its rank, alpha and targets must be these.
    # null: A is drawn.
    path: str | None = None

    def __post_init__(self) -> None:
        if not self.targets or len({*self.targets}) < len(self.targets):
            raise ConfigError(f"lora.targets = {list(self.targets)}: name at least one matrix, and each of them once")


@config
class MeanTokens:
    """The mean lengths of a role's prompts and answers, as a first run measured them. `megatron-rl plan` alone reads
    them."""

    prompt: PositiveInt | None = None  # tokens of a prompt; null: half of max_prompt_tokens
    answer: PositiveInt | None = None  # tokens of an answer; null: half of sampling.max_tokens


@config
class RoleConfig:
    """One role: its model and how that is sampled and trained. Every batch size counts samples (rollouts)."""

    model: Model = field(default_factory=lambda: Model(path=""))  # the files of the model; needed without same_as
    # own: the role has a policy in the trainer, which its engines take weights from. none: its engines keep the weights
    # of model.path, and it costs the trainer no memory; it cannot be trained.
    policy: Literal["own", "none"] = "own"
    # Another role whose policy and engines this one shares. Its own are chat, sampling, max_prompt_tokens, tandem and
    # data; the other role's are model, layout, optimizer, loss and all else that training needs.
    same_as: str | None = None
    # An OpenAI-compatible server that answers for this role; needs policy = none.
    endpoint: EndpointConfig | None = None
    layout: Layout = field(default_factory=Layout)  # division of the model over the ranks
    # Train adapters (LoRA) in place of the model; null: train the model itself. Roles of the same model and layout that
    # both have adapters share one copy of the model in the trainer.
    lora: Lora | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)  # Adam and its learning rate
    loss: LossConfig = field(default_factory=LossConfig)  # the policy loss
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # sampling of its rollouts
    tandem: TandemConfig | None = None  # a junior that writes training rollouts along; evaluation is without it
    # Put the texts that the recipe makes for this role, from its templates, as a user's message into the chat template.
    # Conversations of the data set need no setting.
    chat: bool = False
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are dropped, never cut
    packed: bool = True  # true: sequences end to end without padding; false: one padded row per sequence
    micro_batch_tokens: PositiveInt = 8192  # largest micro-batch, in tokens per context-parallel rank
    samples_per_optimizer_step: PositiveInt | None = None  # B, samples in one optimizer step; null: one step per update
    data: PromptSet | None = None  # problems for this role's iterations; null: the run's `data`
    # For models with experts: train each token with the experts that the engine chose for it. Not with sglang.
    router_replay: bool = False
    # Compute a prompt once for all samples that begin with it, forward and backward, in updates and log-probs
    # (docs/layouts.md). Needs packed, and cp 1.
    shared_prefixes: bool = False
    mean_tokens: MeanTokens = field(default_factory=MeanTokens)  # what `plan` takes for the mean lengths
    sleep: bool = False  # move optimizer state and gradients to CPU memory between this role's iterations

    @property
    def has_policy(self) -> bool:
        """Returns whether the trainer holds a model for this role alone."""
        return self.policy == "own" and self.same_as is None
