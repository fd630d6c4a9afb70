"""Settings of the engines that write rollouts, and of the refits that bring new weights to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError, Share, config

if TYPE_CHECKING:
    from megatron_rl.config.model import RoleConfig

# Words of engines' command lines for copies of the model inside one server. Refits know of a server's `tp` ranks alone.
DATA_PARALLEL = ("--data-parallel-size", "-dp", "--dp-size", "--dp")


@config
class Embedded:
    """The engine inside the trainer's own ranks."""

    kind: Literal["embedded"] = "embedded"  # the engine inside the trainer's ranks
    max_batch: PositiveInt = 256  # rows decoded together on one rank
    # On a GPU, replay the decoding steps of a dense model as CUDA graphs: the tokens are the same, and the host no
    # longer starts every kernel. It takes memory for a graph at a time.
    cuda_graphs: bool = True


@config
class Servers:
    """Inference servers, in processes of their own: `replicas` of them for each role.

    Every engine has a subclass in megatron_rl/engines/NAME/settings.py, whose `kind` is the engine's name. The package
    of the engine has the same name.
    """

    holds_tandems: ClassVar[bool] = False  # whether a server can hold a senior and a junior (roles.NAME.tandem)
    tells_experts: ClassVar[bool] = False  # whether a server tells which experts it chose (roles.NAME.router_replay)

    kind: str = ""  # overridden by each engine
    replicas: PositiveInt = 1  # servers of each role, or of the roles that share them
    tp: PositiveInt = 1  # tensor-parallel ranks of one server
    expert_parallel: bool = False  # give each of a server's ranks whole experts, instead of a part of every expert
    # Addresses of servers that run already, by role. They share no directory with the run.
    urls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # File with the token that servers at `urls` ask for; null: the token in the run directory.
    token_file: str | None = None
    # true: the run starts the servers on its first rank's host. false: `megatron-rl serve` starts them, in jobs of
    # their own.
    start: bool = True
    # true: the servers stand in the trainer's GPUs, replica after replica in the next `tp` of them. They sleep while it
    # trains, and all of the trainer leaves the GPUs while they generate. Servers of several roles stand in one GPU,
    # each with `memory_share` of it. false: servers have GPUs of their own.
    colocate: bool = False
    python: str | None = None  # Python interpreter of the environment that has the engine; null: that of the run
    # Where servers and the refit store listen: an address, an interface (ib0), or auto for this host's own name.
    host: str = "127.0.0.1"
    # GPUs of the servers that the run starts, counted among those that the run sees: the first `tp` are the first
    # server's, and so on. Ranks of the trainer have the first ones. Empty: all of them, which is refused on GPUs, but
    # for the only server of `eval` or `generate`.
    gpus: tuple[NonNegativeInt, ...] = ()
    max_batch: PositiveInt = 256  # sequences that one server decodes together
    max_model_len: PositiveInt | None = None  # longest prompt plus completion, in tokens; null: the model's own limit
    kv_cache_gib: PositiveFloat = 1.0  # key-value cache of one server without a GPU, in GiB
    memory_share: Share = 0.85  # share of each GPU's memory that a server may use
    threads: PositiveInt = 1  # CPU threads of one server without a GPU
    args: tuple[str, ...] = ()  # further words for the server's command line, but none for data parallelism
    # What becomes of a completion that a refit interrupts. continue: go on from its tokens with the new weights.
    # restart: begin anew.
    partial: Literal["continue", "restart"] = "continue"
    # What a refit does to requests under way. abort: they return what they have, see `partial`. wait: they end first.
    # keep: they stop and go on after the refit.
    pause: Literal["abort", "wait", "keep"] = "abort"
    # Sequences asked of one server at once; null: a quarter more than max_batch, so that the server never waits for
    # requests.
    max_sequences: PositiveInt | None = None
    attempts: PositiveInt = 3  # tries of a request that living servers fail, before the run gives up
    request_timeout_s: PositiveFloat = 600.0  # seconds for one request
    start_timeout_s: PositiveFloat = 600.0  # seconds from a server's start until it must answer
    lost_after_s: PositiveFloat = 15.0  # seconds without a sign of life after which a server counts as lost
    wait_s: PositiveFloat = 1800.0  # seconds to wait while no server can be used, before the run gives up
    # Times in a row that a server which dies is started again: at once, then after 10 s, doubled each time up to five
    # minutes. A death after an hour of answers is the first one in a row again. 0: never.
    restarts: NonNegativeInt = 3

    @property
    def at_once(self) -> int:
        """Returns how many sequences are asked of one server at once."""
        return self.max_sequences or self.max_batch + -(-self.max_batch // 4)

    @property
    def serves_adapters(self) -> bool:
        """Whether servers compute with adapters beside a model, so that refits bring the adapters alone."""
        return False

    def role_problems(self, roles: Mapping[str, RoleConfig]) -> list[str]:
        """Returns a sentence for each role that servers of this engine cannot serve as its settings ask."""
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
    """The way the trainer's weights reach the engines after an update (docs/refit.md)."""

    # How tensors travel. auto: the fastest way that trainer and engine both have.
    transport: Literal["auto", "tcp", "gloo", "nccl", "shared_memory", "cuda_ipc", "disk"] = "auto"
    bucket_mib: PositiveFloat = 64.0  # largest message, in MiB
    # Compare checksums of sent and received bytes. sample: one slice in 16, other ones at every refit. full: all. off:
    # none.
    verify: Literal["off", "sample", "full"] = "sample"
    # Send only what changed, where that is smaller. It costs a copy of what is sent, and stops by itself where it saves
    # no time.
    delta: bool = False
    timeout_s: PositiveFloat = 600.0  # seconds for a whole refit; an engine that takes longer is left out
    message_timeout_s: PositiveFloat = 60.0  # seconds for one message
    directory: str | None = None  # directory for transport = disk; all ranks must see it


@config
class Rollouts:
    """Settings of rollouts that are written while training goes on."""

    # Iterations that may be collected before earlier ones are trained on. 0: rollouts and training alternate. Above 0,
    # a role that sets no loss.correction has {kind: truncate, high: 2.0}.
    max_staleness: NonNegativeInt = 0
    # What to do with a rollout that several weight versions wrote. keep: use each token's log-prob as the engine gave
    # it. rescore: compute all of them anew with the trainer. drop: leave the rollout out of the update.
    mixed: Literal["keep", "rescore", "drop"] = "keep"


@config
class EndpointConfig:
    """An OpenAI-compatible server that plays a role with weights of its own. The API key is never part of a config."""

    url: str  # with or without /v1 at its end
    model: str  # name of the model that is asked
    key_file: str | None = None  # file that holds the API key
    key_variable: str | None = None  # environment variable that holds the API key
    token_prompts: bool = True  # true: it takes prompts as token ids; false: as text
    # true: it knows, or ignores, parameters that are vLLM's (top_k, token ids in answers); false: it refuses them.
    extensions: bool = True
    at_once: PositiveInt = 64  # most sequences asked of it at the same time
    attempts: PositiveInt = 6  # tries of a request that it fails
    request_timeout_s: PositiveFloat = 600.0  # seconds to wait for one answer
