"""Settings of one model: its files, its division among the ranks (layout), and its optimizer, loss and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import Share, config
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engines import EndpointConfig

# Rules by which two models take turns in writing a rollout; algorithms/tandem_authors.py explains each rule.
Strategy = Literal["bernoulli", "alternating", "chunk", "sentence", "word"]
# Names of the matrices that can have an adapter, as in Hugging Face and peft.
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Kinds of heads that a model may have in place of the output layer, or beside it. A head computes one number per token.
Head = Literal["value", "score"]
REWARD_OBJECTIVES = ("bradley_terry", "prm")  # values of `loss.objective` for a reward model, which has `head: score`

Ranks = Annotated[int, pydantic.Field(ge=1, le=1 << 16)]  # a number of ranks along one axis of a layout


@config
class Layout:
    """How the model of one role is divided among the ranks. The data-parallel size is ranks / (tp x cp x pp)."""

    tp: Ranks = 1  # number of tensor-parallel ranks
    pp: Ranks = 1  # number of pipeline stages
    cp: Ranks = 1  # number of context-parallel ranks; each rank holds a part of every sequence's tokens
    vpp: int | None = None  # virtual pipeline stages on each rank (interleaved schedule); null: not interleaved
    # Number of expert-parallel ranks; each rank holds a part of a layer's experts. The expert-parallel ranks are taken
    # from the tp x cp x dp ranks of a pipeline stage.
    ep: Ranks = 1
    # Number of tensor-parallel ranks of each expert; null: the same as tp.
    etp: Ranks | None = None
    sequence_parallel: bool = False  # shard norms and residuals along the sequence; needs tp above 1
    overlap_p2p: bool = False  # overlap pipeline sends with computation; required by vpp

    def problems(self) -> Iterator[str]:
        """Yields error messages about settings that exclude each other."""
        if self.sequence_parallel and self.tp == 1:
            yield "layout.sequence_parallel = true with layout.tp = 1: set tp above 1 or sequence_parallel to false"
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            yield f"layout.vpp = {self.vpp} with layout.pp = {self.pp}: both must be at least 2, or vpp null"
        if self.vpp is not None and not self.overlap_p2p:
            yield (
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
        """Returns the number of ranks that together hold one copy of all experts: expert_tp x ep x pp."""
        return self.expert_tp * self.ep * self.pp

    def rank_problems(self, ranks: int) -> Iterator[str]:
        """Yields an error message if `ranks` is not a multiple of both `model_ranks` and `expert_ranks`."""
        if ranks % self.model_ranks:
            yield (
                f"tp {self.tp} x cp {self.cp} x pp {self.pp} = {self.model_ranks} does not divide {ranks} ranks: start "
                "a multiple of it (launch.nproc, or the launcher's), or change the layout"
            )
        elif ranks % self.expert_ranks:
            yield (
                f"etp {self.expert_tp} x ep {self.ep} x pp {self.pp} = {self.expert_ranks} does not divide {ranks} "
                "ranks: lower ep or etp (null is tp), or start a multiple of it"
            )


Kl = Literal["k1", "k2", "k3"]  # estimators of the KL divergence per token, see algorithms/kl.py
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}  # bytes of one weight, by Model.dtype


@config
class Model:
    """The files of a model, and the settings with which the model is built."""

    # Hugging Face model directory or hub name, with config.json, tokenizer, and safetensors if init is pretrained.
    path: str
    tokenizer: str | None = None  # directory of the tokenizer; null: `path`
    chat_template: str | None = None  # file with a Jinja chat template; null: the tokenizer's template
    # Texts that begin and end a thought in the model's responses, such as ["<think>", "</think>"]. null: those of the
    # chat template (docs/how_to/writing_a_reward.md).
    thought_marks: tuple[str, str] | None = None
    # pretrained: load the weights from `path`. random: initialize the weights at random from the seed.
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and activations
    # Which activations are recomputed in the backward pass to save memory. none: no activations.
    # selective: the activations of recompute_modules. full: the activations of whole layers.
    recompute: Literal["none", "selective", "full"] = "none"
    # Parts of a layer whose activations are recomputed if `recompute` is "selective".
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = ("core_attn",)
    # Attention over packed sequences (several sequences in one row, without padding) in layers that are not Transformer
    # Engine's. flash: torch's variable-length flash attention, one call for all sequences; it needs a GPU, bfloat16 and
    # a head size that is a multiple of 8 and at most 256. sdpa: one call of torch's scaled dot-product attention for
    # each group of sequences of similar length. auto: flash if it is available.
    attention_backend: Literal["auto", "flash", "sdpa"] = "auto"
    # Kernels for log-probs, gated activations and rotary embeddings, and for summing gradients on a GPU.
    # triton: Triton kernels of megatron_rl. They need a GPU, and are compared with torch's operations before their use.
    # torch: torch's operations. auto: triton if it is available on all ranks.
    kernels: Literal["auto", "triton", "torch"] = "auto"
    # Weight of the load-balancing loss of experts (Switch Transformer's, computed for each sequence, then averaged over
    # all tokens of the optimizer step); 0: no loss.
    router_aux_loss: NonNegativeFloat = 0.0
    # Compute matmuls in FP8 with Transformer Engine; needs a GPU that supports FP8 (H100 or later, not A100).
    fp8: bool = False


@config
class Optimizer:
    """Adam with decoupled weight decay. After a linear warm-up the learning rate is constant or falls to `min_lr`."""

    lr: NonNegativeFloat = 1e-6  # learning rate after the warm-up
    min_lr: NonNegativeFloat = 0.0  # learning rate at the end of the decay; decay = exponential needs a value above 0
    betas: tuple[Share, Share] = (0.9, 0.999)  # Adam's decay rates of the first and second moment
    eps: PositiveFloat = 1e-8  # Adam's epsilon, which is added to the denominator
    weight_decay: NonNegativeFloat = 0.01  # coefficient of the decoupled weight decay
    decay_norms: bool = False  # true: weight decay also applies to norms and biases, as in torch's AdamW by default
    clip_grad: NonNegativeFloat = 1.0  # maximum global gradient norm; 0: no clipping
    warmup_steps: NonNegativeInt = 0  # optimizer steps during which the learning rate rises from 0 to lr
    # Schedule of the learning rate after the warm-up. exponential: every step multiplies the rate by the same factor.
    decay: Literal["constant", "linear", "cosine", "exponential"] = "constant"
    # Optimizer steps until the learning rate is min_lr, including the warm-up. Required unless decay = constant.
    decay_steps: PositiveInt | None = None
    # Overlap communication with computation: reduce gradients over the data-parallel replicas during the last backward
    # pass, and gather the new weights during the next forward pass of the same update.
    overlap: bool = False

    def problems(self) -> Iterator[str]:
        """Yields error messages about a learning-rate schedule with missing or contradictory settings."""
        if self.decay != "constant" and self.decay_steps is None:
            yield f"optimizer.decay = {self.decay!r} needs optimizer.decay_steps: the step at which min_lr is reached"
        if self.decay != "constant" and self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            yield f"optimizer.decay_steps = {self.decay_steps} is within warmup_steps = {self.warmup_steps}: raise it"
        if self.decay == "exponential" and self.min_lr == 0:
            yield (
                "optimizer.decay = 'exponential' with optimizer.min_lr = 0.0: a constant factor never reaches 0; give "
                "the rate at which the run ends, such as a tenth or a hundredth of lr"
            )
        if self.min_lr > self.lr:
            yield f"optimizer.min_lr = {self.min_lr} is above optimizer.lr = {self.lr}: the rate falls to it"


@config
class CorrectionConfig:
    """Importance weights of tokens, from the ratio r = p_old / p_engine between the trainer's and the engine's
    probability of a token (algorithms/corrections.py).

    `low` and `high` are the bounds of r; `level` says how r is combined over tokens. Examples of published methods: TIS
    is {kind: truncate, high: 2.0}; IcePop is {kind: mask, low: 0.5, high: 5.0}; MIS is {kind: mask, level: sequence,
    high: 3.0}; geometric rejection is {kind: drop, level: geometric, low: 0.999, high: 1.001}.
    """

    # truncate: the weight is r, clamped to the bounds. mask: the weight is r within the bounds and 0 outside. drop: the
    # weight is 1 within the bounds and 0 outside. none: the weight is always 1, even if
    # rollouts.max_staleness is above 0.
    kind: Literal["none", "truncate", "mask", "drop"]
    # token: the token's r. sequence: the product of r over the trained tokens of a rollout. geometric: the geometric
    # mean of r over the trained tokens of a rollout.
    level: Literal["token", "sequence", "geometric"] = "token"
    low: NonNegativeFloat | None = None  # lower bound of the ratio r, at most 1; null: no lower bound
    high: PositiveFloat | None = None  # upper bound of the ratio r, at least 1; null: no upper bound

    def problems(self) -> Iterator[str]:
        """Yields error messages about bounds that do not fit the kind of correction."""
        low, high = self.low, self.high
        if self.kind == "none":
            if self.level != "token" or (low, high) != (None, None):
                yield (
                    f"correction.kind = 'none' with level = {self.level!r}, low = {low}, high = {high}: nothing is "
                    "weighed; leave these out, or choose another kind"
                )
        elif low is None and high is None:
            yield f"correction.kind = {self.kind!r} without bounds: set correction.low, high or both"
        elif not (low or 0.0) <= 1 <= (1 if high is None else high):
            yield (
                f"correction.low = {low}, high = {high}: trainer and engine that agree have the ratio 1, which must "
                "lie within the bounds; set low to at most 1 and high to at least 1"
            )


# Default of a role's `loss.correction` if rollouts are collected ahead of training (rollouts.max_staleness above 0) or
# by engines of lower precision (engine.quantization, engine.kv_cache_dtype).
CORRECTION_AHEAD = CorrectionConfig(kind="truncate", high=2.0)


@config
class LossConfig:
    """The policy loss: an objective + kl_coef * KL(policy || reference) - entropy_coef * entropy."""

    # Name of the loss, or module:name of your own (see algorithms/objectives.py). Losses of each token: clipped, gspo,
    # gmpo, cispo, sapo, dppo_tv, dppo_kl, vespo, reinforce, rover, distilled, distilled_top_k, rl_plus, nll. Losses of
    # each pair or response: dpo, dpo_norm, ipo, simpo, kto, a_lol, rwr. Losses of a reward model (sft only):
    # bradley_terry, prm.
    objective: str = "clipped"
    objective_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the objective
    clip_low: NonNegativeFloat = 0.2  # clipped: ratios of new to old probability below 1 - clip_low are clipped
    clip_high: NonNegativeFloat = 0.2  # clipped: ratios of new to old probability above 1 + clip_high are clipped
    kl_coef: NonNegativeFloat = 0.001  # weight of the KL penalty to the reference model; 0: no penalty
    # Iterations between two resets of the reference model, as in ProRL (arXiv 2505.24864). At a reset, the current
    # weights become the reference model's weights, and the optimizer's moments are set to zero. The number must be a
    # multiple of run.save_every; null: no resets.
    reset_reference_every: PositiveInt | None = None
    # Schulman's estimator of the KL divergence per token. k1: the log-ratio. k2: half the squared log-ratio.
    # k3: unbiased, with low variance, and never negative.
    kl: Kl = "k3"
    # Maximum KL estimate k3 of a token; a clamped token has no KL gradient; null: no clamp
    kl_clamp: PositiveFloat | None = None
    # Multiply a token's KL by the ratio p / p_old, and compute the gradient through the ratio as well. The gradient is
    # then the gradient of the KL even if an older policy generated the rollouts (DeepSeek-V3.2).
    kl_bias_correction: bool = False
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # How the token losses are averaged. token_mean: every trained token has the same weight. sequence_mean: every
    # sequence has the same weight. prompt_mean: every prompt has the same weight, which is divided equally among the
    # trained tokens of the prompt's samples.
    # constant: the sum over tokens is divided by the number of sequences times max_tokens (Dr.GRPO). A loss of each
    # pair or response is always averaged over pairs or responses.
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    max_tokens: PositiveInt | None = None  # sequence length for aggregation = constant; null: sampling.max_tokens
    # Importance weights that correct the mismatch between trainer and engine. null: no weights, or {kind: truncate,
    # high: 2.0} if rollouts.max_staleness is above 0, or if engines generate with quantised weights or KV cache.
    correction: CorrectionConfig | None = None
    # Score centering (arXiv 2609.20807): number k of the engine's most likely tokens at each position, from which the
    # trainer computes what the objective would do for an advantage that does not depend on the token, and subtracts it.
    # 0: no centering. The engine then returns k tokens and log-probs beside each sampled token, which are 8 x k bytes.
    centering: NonNegativeInt = 0
    # Leave tokens with a negative advantage out of the objective if the mean of log p_engine - log p over their rollout
    # is above this threshold (the off-policy sequence mask of DeepSeek-V3.2); null: no mask.
    off_policy_mask: PositiveFloat | None = None
    # For a role with a head: maximum distance between the new and the old value in the loss. A value beyond this
    # distance is clipped, as PPO clips the ratio of a policy; null: no clipping. Of the settings of `loss`, a role with
    # a head reads only value_clip, aggregation and max_tokens.
    value_clip: PositiveFloat | None = 0.5
    # Weight of the value loss in the update of a policy that a critic shares; 0: no critic shares the policy. Such a
    # critic is a role with head = value and same_as. Its loss reads value_clip and aggregation of the shared policy.
    value_coef: NonNegativeFloat = 0.0

    def problems(self) -> Iterator[str]:
        """Yields error messages about settings that the objective or the KL estimator does not read."""
        if self.kl_clamp is not None and self.kl != "k3":
            yield f"loss.kl_clamp = {self.kl_clamp} with loss.kl = {self.kl!r}: it clamps k3 alone; unset it"
        if self.objective != "clipped" and (self.clip_low, self.clip_high) != (0.2, 0.2):
            yield (
                f"loss.clip_low = {self.clip_low}, clip_high = {self.clip_high} with loss.objective = "
                f"{self.objective!r}: they are read by clipped alone; give them in loss.objective_args"
            )


@config
class SamplingConfig:
    """The sampling parameters of one role's rollouts. The number of samples and the seed come from the recipe."""

    max_tokens: PositiveInt = 2048  # maximum length of a completion, in tokens
    temperature: NonNegativeFloat = 1.0  # sampling temperature; 0: greedy decoding
    # Sample only from the most likely tokens whose total probability reaches this value; 1: all tokens.
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0  # sample only from this many most likely tokens; 0: all tokens
    min_p: Share = 0.0  # drop tokens whose probability is below this fraction of the most likely token's probability
    stop_strings: tuple[str, ...] = ()  # texts that end a completion


@config
class TandemConfig:
    """Tandem RL: a frozen junior and the trained senior write each rollout in turns (docs/how_to/tandem.md).

    The senior is the role's model. The senior is trained on the tokens that it wrote itself, and with weight
    `junior_weight` on the junior's tokens.
    """

    # Model directory or hub name of the junior, which must have the same vocabulary; null: the role's initial model
    # (model.path).
    junior: str | None = None
    strategy: Strategy = "word"  # rule that decides which model writes the next token
    p: Share = 0.5  # probability that a random draw chooses the senior (strategies bernoulli and word)
    max_gap: PositiveInt = 32  # strategy word: draw the author again after this many tokens in which no word begins
    chunk_size: PositiveInt = 16  # tokens that one model writes in a row (strategy chunk)
    # JSON file with a list of the token ids after which the author is drawn again (strategy word) or changes (strategy
    # sentence); null: the ids are found in the vocabulary.
    boundary_ids: str | None = None
    junior_weight: Share = 0.0  # weight of the junior's tokens in the senior's loss; the Tandem RL paper uses 0

    def problems(self) -> Iterator[str]:
        """Yields an error message about boundary tokens that the strategy does not read."""
        if self.boundary_ids is not None and self.strategy not in ("word", "sentence"):
            yield (
                f"boundary_ids = {self.boundary_ids!r} with strategy = {self.strategy!r}: word and sentence alone read "
                "it; leave it out"
            )


@config
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685) that are trained instead of the model's weights.

    A matrix W is replaced by W + (alpha / rank) B A, in which W is frozen (docs/how_to/lora.md).
    """

    rank: PositiveInt = 16  # rank r: the number of rows of A and of columns of B
    alpha: PositiveFloat = 32.0  # scale: the product B A is multiplied by alpha / rank
    # The matrices that get an adapter, by their Hugging Face names. In a model with experts, only the matrices of the
    # attention can have an adapter: q_proj, k_proj, v_proj and o_proj.
    targets: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # Random initialization of A; B is zero, so that training starts from the unchanged model. kaiming: uniform within
    # +-1 / sqrt(columns of W), peft's default. gaussian: normal with standard deviation 1 / rank.
    init: Literal["kaiming", "gaussian"] = "kaiming"
    # Directory of an adapter in peft's format from which training starts; its rank, alpha and targets must equal the
    # settings above. null: a new adapter.
    path: str | None = None

    def problems(self) -> Iterator[str]:
        """Yields an error message if `targets` is empty or contains a matrix twice."""
        if not self.targets or len({*self.targets}) < len(self.targets):
            yield f"lora.targets = {list(self.targets)}: name at least one matrix, and each of them once"


@config
class MeanTokens:
    """The mean lengths of a role's prompts and answers, for example as measured in a first run. Only `megatron-rl plan`
    uses these lengths."""

    prompt: PositiveInt | None = None  # mean number of tokens of a prompt; null: half of max_prompt_tokens
    answer: PositiveInt | None = None  # mean number of tokens of an answer; null: half of sampling.max_tokens


@config
class RoleConfig:
    """One role: its model, and how the model is sampled and trained. Batch sizes are in samples (rollouts)."""

    model: Model = field(default_factory=lambda: Model(path=""))  # files of the model; required unless same_as is set
    # own: the trainer holds a policy (trainable weights) for this role, and sends its weights to the engines. none: the
    # engines keep the weights of model.path; the role uses no memory of the trainer and cannot be trained.
    policy: Literal["own", "none"] = "own"
    # Name of another role, whose policy and engines this role shares. Only the settings chat, sampling,
    # max_prompt_tokens, tandem, data and mean_tokens of this role apply; all others are copied from the other role.
    # If `head` is set too, this role is a critic that shares the policy. Then only its head, tandem and data apply.
    same_as: str | None = None
    # An OpenAI-compatible server that generates this role's answers; requires policy = none.
    # null: the run's engine generates the answers.
    endpoint: EndpointConfig | None = None
    # Replace the model's output layer by a head with one output per token. value: a critic, whose output is the value
    # of the state before the next token. score: a reward model, whose output at the last token is the reward of the
    # text. A role with a head generates no text and has no engine. With `same_as`, the value head is added to the other
    # role's policy, which keeps its output layer and needs loss.value_coef above 0. null: no head (a language model).
    head: Head | None = None
    # The ranks that hold the role's model and train it: all, a range such as 8-15 (first and last rank), a number,
    # which takes the next free ranks in the order of the roles, or auto: the ranks with which the plan predicts the
    # shortest cycle (in all roles, or in none). Roles whose ranks are apart train at the same time. Two roles' ranks
    # must be equal, apart, or one a part of the other (docs/how_to/placement.md).
    ranks: int | str = "all"
    layout: Layout = field(default_factory=Layout)  # how the model is divided among the role's ranks
    # Train adapters (LoRA) instead of the model's weights; null: train the model's weights. Roles that train adapters
    # of the same model with the same layout share one copy of the model in the trainer.
    lora: Lora | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)  # Adam and its learning rate
    loss: LossConfig = field(default_factory=LossConfig)  # the policy loss, or the value loss of a role with a head
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # sampling parameters of the role's rollouts
    tandem: TandemConfig | None = None  # a junior model that writes a part of the training rollouts, not of evaluations
    # true: prompts that the recipe fills in from its templates are sent as a user message in the model's chat template.
    # Conversations of the data set always use the chat template.
    chat: bool = False
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are dropped, never truncated
    micro_batch_tokens: PositiveInt = 8192  # maximum size of a micro-batch, in tokens per context-parallel rank
    # Number of samples per optimizer step (B); null: one optimizer step per update. An agent in an episode is a sample.
    samples_per_optimizer_step: PositiveInt | None = None
    data: PromptSet | None = None  # problems of this role's iterations; null: the run's `data`
    # For models with experts: train each token with the experts that the engine chose for it. Not supported with engine
    # kind sglang.
    router_replay: bool = False
    # Compute a prompt once for all samples that begin with the prompt: in the forward and backward passes of updates,
    # and when log-probs are computed (docs/reference/layouts.md). Needs cp = 1.
    shared_prefixes: bool = False
    mean_tokens: MeanTokens = field(default_factory=MeanTokens)  # mean lengths that `megatron-rl plan` assumes
    sleep: bool = False  # move optimizer state and gradients to CPU memory between this role's iterations

    @property
    def has_policy(self) -> bool:
        """Returns whether the trainer holds a separate policy for this role. False for a role without a policy, and for
        a role that shares the policy of another role (`same_as`)."""
        return self.policy == "own" and self.same_as is None

    @property
    def shares_as_critic(self) -> bool:
        """Returns whether this role is a critic that shares the policy of another role. The `loss` settings of such a
        role are those of the shared policy, whose `value_coef` is above 0."""
        return self.head is not None and self.same_as is not None and self.loss.value_coef > 0
