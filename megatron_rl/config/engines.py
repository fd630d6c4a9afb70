"""Settings of the inference engines that generate rollouts, and of refits. A refit sends the trainer's new weights to
the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import Share, config

if TYPE_CHECKING:
    from megatron_rl.config.model import RoleConfig

# Format of the linear layers' weights in engines (weights/quantisation.py).
# "fp8" (DeepSeek's format): float8 values with one float32 scale per block of 128 x 128 elements.
# "mxfp8": float8 values with one power-of-two scale per 32 elements of a row.
# "nvfp4": float4 values with one float8 scale per 16 elements of a row.
Quantization = Literal["fp8", "mxfp8", "nvfp4"]
# Command-line options of engines for data parallelism: several copies of the model in one server.
# These options are rejected, because a weight sync updates only the `tp` ranks of one copy.
DATA_PARALLEL = ("--data-parallel-size", "-dp", "--dp-size", "--dp")


@config
class Embedded:
    """Settings of the embedded engine, which generates rollouts inside the trainer's processes (ranks)."""

    kind: Literal["embedded"] = "embedded"  # the engine inside the trainer's ranks
    max_batch: PositiveInt = 256  # maximum number of sequences that one rank decodes in a batch
    # Format in which weight syncs send the weights of linear layers; null: the model's dtype. Use a format only to
    # try it out: the embedded engine dequantises the received weights, and therefore needs more memory than with null.
    quantization: Quantization | None = None
    # On a GPU, replay the decoding steps of a dense model as CUDA graphs. One graph at a time is kept in GPU memory.
    # The generated tokens are the same as without graphs. Decoding is faster, because the CPU launches fewer kernels.
    cuda_graphs: bool = True

    @property
    def low_precision(self) -> bool:
        """Returns whether the engine generates with lower precision than the trainer computes with."""
        return self.quantization is not None


@config
class Servers:
    """Settings of inference servers in separate processes: `replicas` servers for each role.

    Every engine, such as vLLM, has a subclass in megatron_rl/engines/NAME/settings.py, in which `kind` is NAME.
    """

    # Whether a server can hold both models of Tandem RL, the senior and the junior (roles.NAME.tandem)
    holds_tandems: ClassVar[bool] = False
    # Whether a server's answers say which experts it chose for each token, as roles.NAME.router_replay needs
    tells_experts: ClassVar[bool] = False
    # Whether a server's answers have the most likely tokens at each position, as roles.NAME.loss.centering needs
    tells_top: ClassVar[bool] = False
    # Whether a server returns the most likely tokens of the distribution before top_p, top_k and min_p remove tokens,
    # and not those of the distribution from which it samples
    top_before_cuts: ClassVar[bool] = False
    # Whether a server receives fused expert weights in pinned host memory even if refit.staging = off, so that
    # `megatron-rl plan` counts this memory
    stages_experts: ClassVar[bool] = False

    kind: str = ""  # name of the engine; overridden by each subclass
    replicas: PositiveInt = 1  # number of servers of each role, or of each group of roles that share servers
    tp: PositiveInt = 1  # tensor-parallel ranks of one server
    expert_parallel: bool = False  # true: each rank of a server holds whole experts; false: a slice of every expert
    # Format in which servers hold the weights of linear layers; null: the model's dtype. The trainer quantises the
    # weights at every weight sync. Servers of roles without a policy are not affected, because they keep the weights
    # that they load at their start.
    quantization: Quantization | None = None
    # Format of the key-value cache: fp8_e4m3 and fp8_e5m2 have one byte per element; auto: the model's dtype.
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    # Addresses of servers that are already running: {role: [URL, ...]}. These servers and the run need no shared
    # directory.
    urls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # File with the access token that the servers at `urls` require; null: the token in the run directory.
    token_file: str | None = None
    # true: the run starts the servers on the host of the run's first rank.
    # false: the command `megatron-rl serve` starts the servers in separate jobs.
    start: bool = True
    # true: the servers share the trainer's GPUs; each replica uses the next `tp` GPUs. false: they have separate GPUs.
    # With true, the servers release their GPU memory during training, and the trainer releases all of its GPU memory
    # while the servers generate. Servers of different roles may share a GPU; each server uses the fraction
    # `memory_share` of the GPU's memory.
    colocate: bool = False
    python: str | None = None  # Python interpreter of the engine's environment; null: the interpreter of the run
    # Address at which the servers and the key-value store of weight syncs listen: an IP address, a network interface
    # such as ib0, or auto for the name of the host.
    host: str = "127.0.0.1"
    # GPUs for the servers that the run starts, as indices among the GPUs visible to the run. The first server uses the
    # first `tp` GPUs of the list, and so on. The trainer's ranks use the first GPUs of the host. Empty: all GPUs; on a
    # host with GPUs, an empty list is accepted only for the single server of the commands `eval` and `generate`.
    gpus: tuple[NonNegativeInt, ...] = ()
    max_batch: PositiveInt = 256  # maximum number of sequences that one server decodes in a batch
    max_model_len: PositiveInt | None = None  # maximum tokens of prompt plus completion; null: the limit of the model
    kv_cache_gib: PositiveFloat = 1.0  # size in GiB of the key-value cache of one server that runs without a GPU
    memory_share: Share = 0.85  # fraction of each GPU's memory that a server may use
    threads: PositiveInt = 1  # number of CPU threads of one server that runs without a GPU
    # Further command-line arguments of the server; arguments for data parallelism are rejected
    args: tuple[str, ...] = ()
    # What happens to a completion that a weight sync interrupts. continue: the rest of the completion is generated
    # with the new weights. restart: the completion is generated again from its first token.
    partial: Literal["continue", "restart"] = "continue"
    # What a weight sync does with running requests. wait: the weight sync waits until the requests finish. keep: the
    # requests are paused during the weight sync. abort: the requests end with the tokens generated so far, and then the
    # setting `partial` applies.
    pause: Literal["abort", "wait", "keep"] = "abort"
    # Maximum number of concurrent sequences per server; null: 1.25 x max_batch, so that the server always has requests
    # in its queue.
    max_sequences: PositiveInt | None = None
    # Maximum number of attempts of a request on running servers; if all attempts fail, the run ends with an error
    attempts: PositiveInt = 3
    request_timeout_s: PositiveFloat = 600.0  # timeout of one request, in seconds
    start_timeout_s: PositiveFloat = 600.0  # maximum seconds from the start of a server to its first response
    lost_after_s: PositiveFloat = 15.0  # seconds without a sign of life after which a server is considered lost
    wait_s: PositiveFloat = 1800.0  # seconds to wait while no server is usable; after that, the run ends with an error
    # Maximum number of consecutive restarts of a server that died; 0: no restarts. The first restart is immediate, the
    # second follows after 10 s, and the delay then doubles up to five minutes. The count is reset after the server has
    # responded for an hour.
    restarts: NonNegativeInt = 3

    @property
    def at_once(self) -> int:
        """Returns the maximum number of concurrent sequences per server."""
        return self.max_sequences or self.max_batch + -(-self.max_batch // 4)

    @property
    def serves_adapters(self) -> bool:
        """Returns whether the servers apply LoRA adapters to an unchanged model. If so, a weight sync sends only the
        adapters."""
        return False

    @property
    def low_precision(self) -> bool:
        """Returns whether the servers generate with lower precision than the trainer computes with."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"

    @property
    def cache_width(self) -> int | None:
        """Returns the number of bytes per element of the key-value cache; None if the cache has the model's dtype."""
        return None if self.kv_cache_dtype == "auto" else 1

    def role_problems(self, roles: Mapping[str, RoleConfig]) -> list[str]:
        """Returns an error message for each role whose settings the servers of this engine do not support."""
        problems = [
            f"roles.{name}.tandem with engine.kind = {self.kind!r}: its servers hold one model; set engine.kind to "
            "vllm or embedded"
            for name, role in roles.items()
            if role.tandem is not None and not self.holds_tandems
        ]
        problems += [
            f"roles.{name}.tandem with engine.quantization: such servers hold one model; leave one of them out"
            for name, role in roles.items()
            if role.tandem is not None and self.quantization
        ]
        return problems + [
            f"roles.{name}.router_replay = true with engine.kind = {self.kind!r}: the experts that its servers choose "
            "are not read; set engine.kind to vllm or embedded, or router_replay to false"
            for name, role in roles.items()
            if role.router_replay and not self.tells_experts
        ]

    def problems(self) -> Iterator[str]:
        """Yields an error message for each argument in `args` that asks for data parallelism, and for a `quantization`
        that the servers do not support."""
        if self.quantization == "nvfp4":
            yield (
                "engine.quantization = 'nvfp4': servers need a second scale for each weight, which weight syncs do not "
                "send; set it to fp8 or mxfp8, or engine.kind to embedded"
            )
        if self.quantization and self.serves_adapters:
            yield (
                f"engine.quantization = {self.quantization!r} with engine.adapters = 'served': the base model is "
                "never synced, and weight syncs quantise; set engine.adapters to merged"
            )
        for name in (word.partition("=")[0].replace("_", "-") for word in self.args):
            if name in DATA_PARALLEL:
                yield (
                    f"engine.args has {name}: a refit reaches one copy of the model in each server; leave it out, and "
                    "set engine.replicas to the number of copies"
                )


@config
class RefitConfig:
    """Settings of refits. A refit sends the trainer's weights to the inference engines after an update
    (docs/explanation/refit.md)."""

    # Transport of the tensors. auto: the fastest transport that both the trainer and the engine support, except nixl.
    # nixl: RDMA by the package nixl, which both the trainer's and the engine's Python environment need.
    transport: Literal["auto", "tcp", "nccl", "nixl", "shared_memory", "cuda_ipc", "disk"] = "auto"
    # Memory in which a server receives new weights while it still generates with the old weights. The server then
    # pauses only while it replaces the weights.
    # host: in host memory. device: in GPU memory beside the old weights; the pause is shorter than with host. off: the
    # servers pause, and the new weights overwrite the old weights. auto: host if rollouts.max_staleness is above 0;
    # otherwise off, because servers have nothing to generate during a refit.
    staging: Literal["auto", "off", "host", "device"] = "auto"
    # Maximum size of a message, in MiB. Between processes on the same GPU, messages are up to 8 times as large.
    bucket_mib: PositiveFloat = 64.0
    # Compare checksums of the sent and received bytes. off: no checksums. full: checksums of all slices.
    # sample: checksums of one slice in 16; each refit checks different slices.
    verify: Literal["off", "sample", "full"] = "sample"
    # Send only the values that changed since the last refit, if this is less data than all weights. The setting needs
    # memory for a copy of the sent weights, and is switched off automatically if it saves no time.
    delta: bool = False
    # Timeout of a whole refit, in seconds; an engine that takes longer is left out of this refit
    timeout_s: PositiveFloat = 600.0
    message_timeout_s: PositiveFloat = 60.0  # timeout of one message, in seconds
    directory: str | None = None  # directory for transport = disk; all ranks must be able to access it

    @property
    def staged(self) -> bool:
        """Returns whether servers receive new weights while they generate."""
        return self.staging in ("host", "device")

    def problems(self) -> Iterator[str]:
        """Yields an error message if transport = disk and no directory is set."""
        if self.transport == "disk" and self.directory is None:
            yield "refit.transport = disk: set refit.directory to a directory that trainer and engines see"


@config
class Rollouts:
    """Settings of rollouts: how many iterations ahead of training they may be generated, and with which answers the
    generated answers are compared."""

    # How many iterations the generation of rollouts may be ahead of training. 0: rollouts and training alternate. k
    # above 0: the rollouts of k + 1 iterations are generated at the same time, with priority for the oldest iteration,
    # and no rollout is discarded; each role then has the importance weights {kind: truncate, high: 2.0} by default
    # (loss.correction). auto: the smallest number whose throughput, as predicted by `megatron-rl plan`, is within 5 %
    # of the highest throughput.
    max_staleness: NonNegativeInt | Literal["auto"] = 0
    # What to do with a rollout that was generated with several weight versions. keep: use the log-probs that the engine
    # returned. rescore: recompute all log-probs with the trainer. drop: leave the rollout out of the update.
    mixed: Literal["keep", "rescore", "drop"] = "keep"
    # The correct answer with which the samples of a problem are compared. known: the reference answer in the data.
    # votes: the most frequent answer of the samples (TTRL, arXiv 2504.16084), for problems without reference answers.
    # Evaluations always use the reference answers.
    labels: Literal["known", "votes"] = "known"

    @property
    def ahead(self) -> int:
        """Returns max_staleness, or 1 if max_staleness is still `auto` because no number has been chosen yet."""
        return 1 if self.max_staleness == "auto" else self.max_staleness


@config
class EndpointConfig:
    """An OpenAI-compatible server that generates a role's answers with its own weights. The API key is never part of a
    config."""

    url: str  # address of the server, with or without /v1 at its end
    model: str  # name of the model that is requested
    key_file: str | None = None  # file that holds the API key
    key_variable: str | None = None  # environment variable that holds the API key
    token_prompts: bool = True  # true: prompts are sent as token ids; false: as text
    # true: the server accepts or ignores vLLM's additional parameters (top_k, token ids in answers); false: the server
    # rejects them.
    extensions: bool = True
    at_once: PositiveInt = 64  # maximum number of concurrent sequences on the server
    attempts: PositiveInt = 6  # maximum number of attempts of a request
    request_timeout_s: PositiveFloat = 600.0  # timeout of one answer, in seconds
