"""Every setting of a run, as frozen dataclasses; config_files.py reads them, config_checks.py checks one against the other.

Imports neither torch nor Megatron, so that a config can be checked on a login node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

C = TypeVar("C")
Share = Annotated[float, pydantic.Field(ge=0, le=1)]  # of a whole
Strategy = Literal["bernoulli", "alternating", "chunk", "sentence", "word"]  # see algorithms/authors.py


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value and the cure."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """A frozen keyword-only dataclass that refuses unknown keys and wrong types when read."""
    cls.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


@config
class Use:
    """A plug-in: `package.module:name`, and the arguments it is built or called with."""

    target: str
    args: dict[str, Any] = field(default_factory=dict)


@config
class Layout:
    """How one role's model lies over the ranks; the data-parallel size is what remains."""

    tp: int = 1  # tensor parallel ranks
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallel ranks: each holds its share of every sequence's tokens
    vpp: int | None = None  # virtual stages per rank (interleaved schedule)
    ep: int = 1  # expert parallel ranks: each holds its share of a layer's experts; taken from the tp x cp x dp ranks of a stage
    etp: int | None = (
        None  # tensor parallel ranks of each expert; null: as many as tp, so that tp alone shards the whole model
    )
    sequence_parallel: bool = False  # shard norms and residuals along the sequence; needs tp > 1
    overlap_p2p: bool = False  # overlap pipeline sends with compute; vpp needs it

    def __post_init__(self) -> None:
        for name, number in (
            ("tp", self.tp),
            ("pp", self.pp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("etp", self.expert_tp),
        ):
            if number < 1:
                raise ConfigError(f"layout.{name} = {number}: give a number of ranks, at least 1")
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
                f"layout.vpp = {self.vpp} with layout.overlap_p2p = false gives wrong gradients in Megatron-core without an error: "
                "set layout.overlap_p2p=true"
            )

    @property
    def model_ranks(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts once, all stages together."""
        return self.expert_tp * self.ep * self.pp


@config
class Model:
    path: str  # a Hugging Face model directory: config.json, tokenizer, and safetensors when init is pretrained
    tokenizer: str | None = None  # another tokenizer directory; the default is `path`
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"  # recompute activations in the backward pass
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = (
        "core_attn",
    )  # what "selective" recomputes
    router_aux_loss: NonNegativeFloat = (
        0.0  # weight of the experts' load-balancing loss (Switch Transformer's, per micro-batch)
    )
    fp8: bool = (
        False  # matrix products in 8 bits, by Transformer Engine; needs a GPU that has them (H100 and later, no A100)
    )


@config
class Optimizer:
    """Adam with decoupled weight decay; warm-up is linear, then the rate is constant or falls to `min_lr`."""

    lr: NonNegativeFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: NonNegativeFloat = 1.0  # global gradient norm; 0 is off
    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: PositiveInt | None = (
        None  # optimizer steps until `min_lr`, warm-up included; linear and cosine need it
    )
    overlap: bool = False  # sum gradients over replicas during the last backward pass, not after it

    def __post_init__(self) -> None:
        if self.decay != "constant" and self.decay_steps is None:
            raise ConfigError(
                f"optimizer.decay = {self.decay!r} needs optimizer.decay_steps: the step at which min_lr is reached"
            )
        if self.decay != "constant" and self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"optimizer.decay_steps = {self.decay_steps} is within warmup_steps = {self.warmup_steps}: raise it"
            )
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optimizer.min_lr = {self.min_lr} is above optimizer.lr = {self.lr}: the rate falls to it"
            )


@config
class LossConfig:
    """An objective + kl_coef * KL(policy || reference) - entropy_coef * entropy."""

    objective: str = "clipped"  # clipped, gspo, cispo, rover, distilled, or module:name (algorithms/objectives.py)
    objective_args: dict[str, Any] = field(
        default_factory=dict
    )  # what the objective takes; clipped has clip_low, clip_high
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    kl_coef: NonNegativeFloat = 0.001
    kl: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    max_tokens: PositiveInt | None = None  # of a rollout, for aggregation `constant`; null: sampling.max_tokens
    tis_cap: PositiveFloat | None = (
        None  # truncated importance sampling of trainer against engine: min(pi_old / pi_engine, cap)
    )


@config
class SamplingConfig:
    """The draw of one role's rollouts; n and the seed come from the recipe."""

    max_tokens: PositiveInt = 2048
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Share = 0.0
    stop_strings: tuple[str, ...] = ()


@config
class TandemConfig:
    """A frozen junior writes the role's rollouts along with it; the role, the senior, is trained on its own tokens (docs/tandem.md)."""

    junior: str | None = (
        None  # a model directory or hub name with the same vocabulary; null: the role's own start, model.path
    )
    strategy: Strategy = "word"  # when the author changes
    p: Share = 0.5  # chance that a draw gives the pen to the senior (bernoulli, word)
    max_gap: PositiveInt = 32  # tokens without a new word after which there is a draw all the same (word)
    chunk_size: PositiveInt = 16  # tokens of one author (chunk)
    junior_weight: Share = 0.0  # of the junior's tokens in the senior's loss; the paper's runs have 0


@config
class PromptSet:
    """Where problems come from. `path` is a JSONL or Parquet file, a directory of them, or a Hugging Face data set."""

    path: str
    settings: str | None = None  # a ready-made mapping: eurus2_rl, eurus2_sft, deepscaler, gsm8k, math, last_letter
    subset: str | None = None  # configuration of a Hugging Face data set; null: as `settings` has it, else its only one
    split: str = "train"  # of a Hugging Face data set, or of a directory with files train*, test*, ...
    fields: dict[str, str] = field(
        default_factory=dict
    )  # our name -> the row's key, dots reach inside: {question: problem}
    filters: dict[str, Any] = field(default_factory=dict)  # keep rows whose key equals the value
    answer_pattern: str | None = (
        None  # regular expression; group 1 (or all, without groups) of its last match is the answer
    )
    answer_commas: bool | None = (
        None  # false: take them out of the answer (1,234 -> 1234); null: as `settings` has it, else true
    )
    remove_suffix: str | None = None  # text cut from the end of the question
    limit: PositiveInt | None = None  # at most so many problems: the first usable rows that pass the filters
    shuffle: bool = True  # a new deterministic order every epoch
    max_bad_share: Share = 0.01  # refuse the set when more of its rows are unusable


@config
class RoleConfig:
    """One trained model. Batch sizes count samples (trajectories), everywhere."""

    model: Model
    layout: Layout = field(default_factory=Layout)
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss: LossConfig = field(default_factory=LossConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tandem: TandemConfig | None = None  # of its training rollouts; it is evaluated alone
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are dropped, never cut
    packed: bool = True  # sequences end to end, no padding compute; false: one row per sequence, padded
    micro_batch_tokens: PositiveInt = 8192  # tokens per micro-batch and context parallel rank
    samples_per_optimizer_step: int | None = None  # B; null: one optimizer step per update
    data: PromptSet | None = None  # problems of this role's turns; null: the run's
    router_replay: bool = False  # experts: train each token with those that its engine chose; engine.kind must be vllm
    sleep: bool = False  # off-load optimizer and gradients between this role's turns


@config
class Evaluation:
    prompts: PromptSet | None = None
    every: NonNegativeInt = 0  # steps; 0: only at the end
    at_start: bool = True
    num_prompts: PositiveInt = 256


@config
class Embedded:
    kind: Literal["embedded"] = "embedded"
    max_batch: PositiveInt = 256  # rows decoded together on one rank


@config
class Servers:
    """Servers that roll out, as processes of their own: `replicas` for each role."""

    replicas: PositiveInt = 1
    tp: PositiveInt = 1  # tensor-parallel ranks of one server
    expert_parallel: bool = False  # share experts out over these ranks whole, not each expert
    urls: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by role: servers that run already and share no directory with the run
    token_file: str | None = None  # the token that servers at `urls` want; null: that in the run directory
    start: bool = (
        True  # the run starts them, on its first rank's host; false: `megatron-rl serve` does, in jobs of their own
    )
    python: str | None = None  # interpreter of the environment that has the engine; null: that of the run
    host: str = "127.0.0.1"  # where servers and the refit board listen: an address, an interface (ib0), or auto: this host's own name
    gpus: tuple[
        NonNegativeInt, ...
    ] = ()  # of servers that the run starts, tp for each in turn; empty: those that are visible
    max_batch: PositiveInt = 256  # sequences decoded together at one server
    max_model_len: PositiveInt | None = None  # tokens of prompt and completion; null: the model's own
    kv_cache_gib: PositiveFloat = 1.0  # of one server without a GPU
    memory_share: Share = 0.85  # of each GPU
    threads: PositiveInt = 1  # of one server without a GPU
    args: tuple[str, ...] = ()  # further words for the server's command line
    partial: Literal["continue", "restart"] = "continue"  # what becomes of completions that a refit interrupts
    pause: Literal["abort", "wait", "keep"] = (
        "abort"  # at a refit, requests under way: come back partial; end first; go on after it
    )
    max_sequences: PositiveInt | None = (
        None  # asked of one server at once; null: a quarter more than max_batch, so that none is waited for
    )
    attempts: PositiveInt = 3  # of a request that a living server fails, before the run gives up
    request_timeout_s: PositiveFloat = 600.0
    start_timeout_s: PositiveFloat = 600.0  # from a server's start until it answers
    lost_after_s: PositiveFloat = 15.0  # without a sign of life
    wait_s: PositiveFloat = 1800.0  # for a first living server, before the run gives up
    restarts: NonNegativeInt = 3  # of a server that dies

    @property
    def at_once(self) -> int:
        """Sequences asked of one server at once."""
        return self.max_sequences or self.max_batch + -(-self.max_batch // 4)


@config
class Vllm(Servers):
    kind: Literal["vllm"] = "vllm"


@config
class Sglang(Servers):
    kind: Literal["sglang"] = "sglang"


@config
class Reward:
    """A function (response, payload) -> float in [0, 1], run in worker processes."""

    target: str = "megatron_rl.rewards.math_answer:grade"
    args: dict[str, Any] = field(default_factory=dict)
    workers: PositiveInt = 2
    timeout_s: PositiveFloat = 5.0
    memory_mib: PositiveInt = 2048
    max_failure_share: Share = 0.05  # stop the run when more gradings of one update time out or raise
    wrong_answer: str = "-123456.789"  # the known wrong answer of the step-0 gate
    answer_format: str = (
        "<answer>\\boxed{{answer}}</answer>"  # the response that the gate grades; {answer} becomes the answer
    )

    def __post_init__(self) -> None:
        if "{answer}" not in self.answer_format:
            raise ConfigError(
                f"reward.answer_format = {self.answer_format!r}: it needs {{answer}} where the answer stands"
            )


@config
class Run:
    name: str = "run"
    dir: str = "runs"  # the run directory is dir/name
    seed: int = 0
    steps: int | None = None  # null: as many as the recipe plans; fewer end the run early
    prompts_per_step: int = 256  # P, of every turn
    save_every: NonNegativeInt = 50  # steps; 0: only at the end
    keep: PositiveInt = 2  # newest checkpoints kept
    async_save: bool = (
        False  # write checkpoints beside training, by processes that hold a copy; the first one is waited for
    )
    resume: Literal["auto", "never", "must"] = "auto"
    save_rollouts_every: NonNegativeInt = 1  # turns whose rollouts stay in RUN/rollouts, with texts; 0: none
    deterministic: bool = (
        False  # only kernels that give the same bits every time, where there are several; slower on a GPU
    )
    hang_after_s: NonNegativeFloat = (
        7200.0  # without a phase of a turn that ends, all ranks write their stacks and end; 0: never
    )


@config
class Launch:
    nproc: PositiveInt = 1  # ranks started here when no launcher (torchrun, srun) did


@config
class RefitConfig:
    """How the trainer's weights reach the engines after an update."""

    transport: Literal["auto", "tcp", "gloo", "nccl", "shared_memory", "cuda_ipc", "disk"] = (
        "auto"  # auto: the fastest that both ends have
    )
    bucket_mib: PositiveFloat = 64.0  # largest message
    verify: Literal["off", "sample", "full"] = (
        "sample"  # compare checksums of what landed; sample: one slice of 16, others every time
    )
    delta: bool = False  # send what changed, where that is less, as long as it saves time; costs a copy of what is sent
    timeout_s: PositiveFloat = 600.0  # of a whole refit; an engine that takes longer is left out
    message_timeout_s: PositiveFloat = 60.0  # of one message
    directory: str | None = None  # of transport = disk: one that all ranks see


@config
class Rollouts:
    """Generation beside training."""

    max_staleness: NonNegativeInt = (
        0  # turns that may be played before earlier ones are trained on; 0: one after the other
    )
    tis_cap: PositiveFloat = 2.0  # loss.tis_cap of roles that have none, where max_staleness > 0
    mixed: Literal["keep", "rescore", "drop"] = (
        "keep"  # what two versions wrote: every token has its own log-prob; the trainer's; or leave
    )


@config
class JobConfig:
    """The run on a Slurm cluster, for `megatron-rl submit`; what is the site's own stands in its profile. null: as the profile has it."""

    nodes: PositiveInt = 1  # of the trainer
    time: str | None = None  # limit of one slice, as sbatch takes it: 04:00:00
    slices: PositiveInt = 1  # of the trainer's time, one after the other; each goes on from the newest checkpoint
    warning_s: PositiveInt | None = None  # before the time limit the run is asked to save and leave
    stalled: PositiveInt = 3  # starts without a new checkpoint, one after the other, that end the chain
    engine_time: str | None = None  # limit of one server, which starts again after it; null: as `time`


@config
class Gate:
    """The step-0 gate: what must hold before the first update."""

    num_prompts: PositiveInt = 4
    max_logprob_gap: NonNegativeFloat = 0.05  # mean |engine - trainer| log-prob of sampled tokens
    enabled: bool = True


@config
class Debug:
    replay: str | None = None  # a run that kept every turn: train on its rollouts, without engines


@config
class Sinks:
    tensorboard: bool = False
    wandb_project: str | None = None


@config
class TrainConfig:
    """Reinforcement learning: `megatron-rl train`."""

    roles: dict[str, RoleConfig]
    recipe: Use
    data: PromptSet
    evaluation: Evaluation = field(default_factory=Evaluation)
    engine: Annotated[Embedded | Vllm | Sglang, pydantic.Field(discriminator="kind")] = field(default_factory=Embedded)
    reward: Reward = field(default_factory=Reward)
    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    refit: RefitConfig = field(default_factory=RefitConfig)
    rollouts: Rollouts = field(default_factory=Rollouts)
    gate: Gate = field(default_factory=Gate)
    debug: Debug = field(default_factory=Debug)
    sinks: Sinks = field(default_factory=Sinks)
    job: JobConfig = field(default_factory=JobConfig)


@config
class SftData:
    """Prompt/response pairs as JSONL or Parquet; the loss is on the response alone."""

    train: str
    validation: str | None = None
    prompt_field: str = "prompt"
    response_field: str = "response"
    append_eos: bool = True
    shuffle: bool = True
    max_tokens: PositiveInt = 4096  # longer pairs are dropped and counted
    max_bad_share: Share = 0.01


@config
class SftConfig:
    """Supervised fine-tuning: `megatron-rl sft`. Writes a Hugging Face directory at dir/name/model."""

    model: Model
    data: SftData
    layout: Layout = field(default_factory=Layout)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=5e-6))
    samples_per_step: int = 64
    steps: int | None = None  # null: `epochs` passes
    epochs: PositiveFloat = 1.0
    validate_every: NonNegativeInt = 100  # steps; 0: only at the end
    micro_batch_tokens: PositiveInt = 8192  # at least data.max_tokens
    run: Run = field(default_factory=lambda: Run(name="sft", save_every=100))
    launch: Launch = field(default_factory=Launch)
    sinks: Sinks = field(default_factory=Sinks)
    job: JobConfig = field(default_factory=JobConfig)


@config
class GenerateConfig:
    """Make SFT data with a teacher: `megatron-rl generate`. Writes train.parquet and validation.parquet."""

    model: Model
    data: PromptSet
    template: str  # a prompt text file with {question}
    output: str  # directory
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    n: PositiveInt = 1
    seed: int = 0
    validation_share: Share = 0.02
    engine: Embedded = field(default_factory=Embedded)
    launch: Launch = field(default_factory=Launch)


@config
class Judging:
    """A verifier that weighs a generator's samples: best of n, and weighted votes."""

    model: Model
    template: str = "tango_verifier"
    votes: PositiveInt = 1  # verifications of one sample
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@config
class GradingConfig:
    """Grade given completions: `megatron-rl eval --completions`."""

    benchmark: str | None = None  # whose grader to use; null: `reward`
    reward: Reward = field(default_factory=lambda: Reward(workers=1))


@config
class EvalConfig:
    """Measure a model on problem sets: `megatron-rl eval`."""

    model: Model  # the generator; of sets of solutions (processbench_*) the verifier; of a hand-off the one that starts
    benchmarks: tuple[str, ...] = ()  # by name, see docs/evaluation.md
    data_dir: str | None = None  # the benchmarks' local files; null: the Hugging Face hub
    data: PromptSet | None = None  # a set of your own, graded by `reward`
    limit: PositiveInt | None = None  # problems of each benchmark
    template: str | None = None  # null: the benchmark's own, and tango_generator for `data`
    chat: bool = False  # the prompt is a user's message in the tokenizer's chat template
    output: str | None = (
        None  # NAME.json, the figures; NAME.jsonl, every sample, and NAME.html, the report, go beside it
    )
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    context: PositiveInt | None = None  # tokens of prompt and answer; max_tokens shrinks to context - prompt - 8
    n: PositiveInt = 1
    k: tuple[PositiveInt, ...] = (1,)  # of pass@k
    seed: int = 0
    measures: tuple[Literal["solve", "handoff", "legibility", "drift"], ...] = ("solve",)
    junior: Model | None = None  # the other model of handoff, legibility and drift
    base: Model | None = None  # what training began from, for drift
    max_rounds: PositiveInt = 150  # turns of a hand-off
    verifier: Judging | None = None
    reward: Reward = field(default_factory=Reward)  # the grader of `data`; workers and limits of every grader
    engine: Annotated[Embedded | Vllm | Sglang, pydantic.Field(discriminator="kind")] = field(default_factory=Embedded)
    launch: Launch = field(default_factory=Launch)

    def __post_init__(self) -> None:
        if not self.benchmarks and self.data is None:
            raise ConfigError(
                "benchmarks = [] without data: name benchmarks (gsm8k, amc23, ...), or give a problem set of your own by data.path"
            )
        if self.limit is not None and not self.benchmarks:
            raise ConfigError(
                f"limit = {self.limit} is of benchmarks, and none is named: a set of your own has data.limit"
            )
        if too_large := [k for k in self.k if k > self.n]:
            raise ConfigError(
                f"k = {list(self.k)} with n = {self.n}: pass@{too_large[0]} needs as many samples; raise n"
            )
        if self.junior is None and (missing := [m for m in self.measures if m != "solve"]):
            raise ConfigError(f"measures = {list(self.measures)}: {missing[0]} needs a second model; set junior.path")
        if {"legibility", "drift"} & set(self.measures) and "solve" not in self.measures:
            raise ConfigError(
                f"measures = {list(self.measures)}: legibility and drift are of the texts that solve writes; add solve"
            )
        if self.output is not None and not self.output.endswith(".json"):
            raise ConfigError(f"output = {self.output!r}: give NAME.json; NAME.jsonl and NAME.html go beside it")
