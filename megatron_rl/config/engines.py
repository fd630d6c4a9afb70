"""Settings of the engines that generate rollouts, and of refits, which send new weights to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError, Share, config

if TYPE_CHECKING:
    from megatron_rl.config.model import RoleConfig

# Command-line options with which engines keep several copies of the model in one server. They are refused: a refit
# updates only the `tp` ranks of one copy.
DATA_PARALLEL = ("--data-parallel-size", "-dp", "--dp-size", "--dp")


@config
class Embedded:
    """The engine that runs inside the trainer's ranks."""

    kind: Literal["embedded"] = "embedded"  # the engine inside the trainer's ranks
    max_batch: PositiveInt = 256  # maximum number of sequences that one rank decodes together
    # On a GPU, replay the decoding steps of a dense model as CUDA graphs. The tokens are the same, and the host does
    # not launch every kernel. One graph at a time is kept in GPU memory.
    cuda_graphs: bool = True


@config
class Servers:
    """Inference servers in separate processes: `replicas` servers for each role.

    Every engine has a subclass in megatron_rl/engines/NAME/settings.py. `kind` of the subclass is NAME.
    """

    holds_tandems: ClassVar[bool] = False  # whether a server can hold a senior and a junior (roles.NAME.tandem)
    tells_experts: ClassVar[bool] = False  # whether a server returns the experts it chose (roles.NAME.router_replay)

    kind: str = ""  # name of the engine; overridden by each subclass
    replicas: PositiveInt = 1  # number of servers of each role, or of the roles that share servers
    tp: PositiveInt = 1  # tensor-parallel ranks of one server
    expert_parallel: bool = False  # true: each rank of a server holds whole experts; false: a part of every expert
    # Addresses of servers that are already running, by role. They need no directory in common with the run.
    urls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # File with the access token that the servers at `urls` require; null: the token in the run directory.
    token_file: str | None = None
    # true: the run starts the servers on the host of its first rank. false: `megatron-rl serve` starts them, in
    # separate jobs.
    start: bool = True
    # true: the servers share the trainer's GPUs; each replica uses the next `tp` GPUs. They sleep during training, and
    # the trainer releases all of its GPU memory while they generate. Servers of several roles share a GPU, each with
    # the fraction `memory_share` of its memory. false: the servers have separate GPUs.
    colocate: bool = False
    python: str | None = None  # Python interpreter of the engine's environment; null: the interpreter of the run
    # Where the servers and the refit store listen: an address, an interface (ib0), or auto for the name of this host.
    host: str = "127.0.0.1"
    # Indices of the GPUs of the servers that the run starts, among the GPUs that the run sees: the first `tp` GPUs are
    # the first server's, and so on. The trainer's ranks use the first GPUs of the host. Empty: all GPUs; this is an
    # error on GPUs, except for the only server of `eval` or `generate`.
    gpus: tuple[NonNegativeInt, ...] = ()
    max_batch: PositiveInt = 256  # maximum number of sequences that one server decodes together
    max_model_len: PositiveInt | None = None  # maximum tokens of prompt plus completion; null: the limit of the model
    kv_cache_gib: PositiveFloat = 1.0  # key-value cache of one server without a GPU, in GiB
    memory_share: Share = 0.85  # fraction of each GPU's memory that a server may use
    threads: PositiveInt = 1  # CPU threads of one server without a GPU
    args: tuple[str, ...] = ()  # further command-line arguments of the server; none for data parallelism
    # What happens to a completion that a refit interrupts. continue: generation continues after its tokens with the new
    # weights. restart: the completion is generated from the beginning.
    partial: Literal["continue", "restart"] = "continue"
    # What a refit does with running requests. abort: they return the tokens they have, see `partial`. wait: they finish
    # before the refit. keep: they are paused and continue after the refit.
    pause: Literal["abort", "wait", "keep"] = "abort"
    # Maximum number of concurrent sequences per server; null: 1.25 x max_batch, so that the server always has requests
    # in its queue.
    max_sequences: PositiveInt | None = None
    attempts: PositiveInt = 3  # tries of a request that fails on running servers, before the run ends with an error
    request_timeout_s: PositiveFloat = 600.0  # timeout of one request, in seconds
    start_timeout_s: PositiveFloat = 600.0  # seconds after its start within which a server must respond
    lost_after_s: PositiveFloat = 15.0  # seconds without a sign of life after which a server is considered lost
    wait_s: PositiveFloat = 1800.0  # seconds to wait while no server is usable, before the run ends with an error
    # How often in a row a server that died is started again: at once, then after 10 s, doubled each time up to five
    # minutes. The count starts again after an hour in which the server answered. 0: never.
    restarts: NonNegativeInt = 3

    @property
    def at_once(self) -> int:
        """Returns the maximum number of concurrent sequences per server."""
        return self.max_sequences or self.max_batch + -(-self.max_batch // 4)

    @property
    def serves_adapters(self) -> bool:
        """Returns whether servers apply adapters to an unchanged model, so that refits send only the adapters."""
        return False

    def role_problems(self, roles: Mapping[str, RoleConfig]) -> list[str]:
        """Returns an error message for each role whose settings the servers of this engine do not support."""
        problems = [
            f"roles.{name}.tandem with engine.kind = {self.kind!r}: its servers hold one model; set engine.kind to "
            "vllm or embedded"
            for name, role in roles.items()
            if role.tandem is not None and not self.holds_tandems
        ]
        return problems + [
            f"roles.{name}.router_replay = true with engine.kind = {self.kind!r}: its servers do not tell the experts "
            "that they choose; set engine.kind to vllm or embedded, or router_replay to false"
            for name, role in roles.items()
            if role.router_replay and not self.tells_experts
        ]

    def __post_init__(self) -> None:
        names = [word.partition("=")[0].replace("_", "-") for word in self.args]
        if copies := [name for name in names if name in DATA_PARALLEL]:
            raise ConfigError(
                f"engine.args has {copies[0]}: a refit reaches one copy of the model in each server; leave it out, and "
                "set engine.replicas to the number of copies"
            )


@config
class RefitConfig:
    """How refits send the trainer's weights to the engines after an update (docs/refit.md)."""

    # Transport of the tensors. auto: the fastest transport that both the trainer and the engine support.
    transport: Literal["auto", "tcp", "gloo", "nccl", "shared_memory", "cuda_ipc", "disk"] = "auto"
    bucket_mib: PositiveFloat = 64.0  # maximum size of a message, in MiB
    # Compare checksums of sent and received bytes. sample: of one slice in 16, other slices at every refit. full: of
    # all slices. off: no checksums.
    verify: Literal["off", "sample", "full"] = "sample"
    # Send only the values that changed, if that is smaller. It needs memory for a copy of the sent weights, and is
    # switched off automatically if it saves no time.
    delta: bool = False
    timeout_s: PositiveFloat = 600.0  # timeout of a whole refit, in seconds; an engine that takes longer is left out
    message_timeout_s: PositiveFloat = 60.0  # timeout of one message, in seconds
    directory: str | None = None  # directory for transport = disk; all ranks must be able to access it


@config
class Rollouts:
    """Settings of asynchronous rollouts, which are generated during training."""

    # How many iterations the generation of rollouts may be ahead of training. 0: rollouts and training alternate. Above
    # 0, the default of a role's loss.correction is {kind: truncate, high: 2.0}.
    max_staleness: NonNegativeInt = 0
    # What to do with a rollout that was generated with several weight versions. keep: use the log-probs that the engine
    # returned. rescore: recompute all of its log-probs with the trainer. drop: leave the rollout out of the update.
    mixed: Literal["keep", "rescore", "drop"] = "keep"


@config
class EndpointConfig:
    """An OpenAI-compatible server that generates a role's answers with its own weights. The API key is never part of a
    config."""

    url: str  # address of the server, with or without /v1 at its end
    model: str  # name of the model that is requested
    key_file: str | None = None  # file that holds the API key
    key_variable: str | None = None  # environment variable that holds the API key
    token_prompts: bool = True  # true: prompts are sent as token ids; false: as text
    # true: the server accepts, or ignores, vLLM's additional parameters (top_k, token ids in answers); false: it
    # rejects them.
    extensions: bool = True
    at_once: PositiveInt = 64  # maximum number of concurrent sequences on the server
    attempts: PositiveInt = 6  # tries of a request that fails
    request_timeout_s: PositiveFloat = 600.0  # timeout of one answer, in seconds
