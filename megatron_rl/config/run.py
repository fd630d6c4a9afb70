"""Settings of a run as a whole: its length, directory and checkpoints, its ranks, its Slurm job, and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import config, path_problems


@config
class Profile:
    """The iterations and ranks whose work torch's profiler records. Traces are written to RUN/profiles."""

    iterations: tuple[NonNegativeInt, ...] = ()  # iterations, counted from 0 as in metrics.jsonl; empty: no traces
    ranks: tuple[NonNegativeInt, ...] = (0,)  # ranks of the trainer

    def rank_problems(self, ranks: int, iterations: float) -> Iterator[str]:
        """Yields error messages if this profile names ranks or iterations that do not exist in the run, or names
        iterations but no ranks.

        `ranks`, `iterations`: number of ranks and of iterations of the run.
        """
        if self.iterations and not self.ranks:
            yield "run.profile.ranks is empty: name the ranks that write traces, such as [0]"
        if self.iterations and max(self.ranks, default=0) >= ranks:
            yield f"run.profile.ranks = {list(self.ranks)}: the trainer has {ranks} ranks, counted from 0"
        if max(self.iterations, default=0) >= iterations > 0:
            yield f"run.profile.iterations = {list(self.iterations)}: the run has {iterations} iterations, from 0 on"


@config
class Run:
    """The length of a run, its directory and its checkpoints.

    For `sft`, an iteration is an optimizer step.
    """

    name: str = "run"  # name of the run
    dir: str = "runs"  # the run directory is dir/name
    seed: int = 0  # seed of all random numbers of the run
    # Number of iterations of the run; null: the number of iterations that the recipe plans. A smaller number than
    # planned ends the run early.
    iterations: PositiveInt | None = None
    prompts_per_iteration: PositiveInt = 256  # number of prompts of every iteration (P)
    # What happens to an update whose advantages are all 0. false: it is skipped. true: the optimizer steps are still
    # taken; they apply the KL term, the entropy bonus, weight decay and momentum, as in the code release of RL Tango.
    train_without_signal: bool = False
    save_every: NonNegativeInt = 50  # iterations between checkpoints; 0: only at the end
    keep: PositiveInt = 2  # number of newest checkpoints that are kept
    # Write checkpoints while training continues: separate processes write a copy of the training state. Only the first
    # checkpoint blocks training.
    async_save: bool = False
    # Whether to continue a run in the run directory. auto: continue the run if there is one; otherwise start a new run.
    # never: fail if the directory contains a run. must: fail if the directory contains no run. With must, settings may
    # differ from those of the run's earlier start.
    resume: Literal["auto", "never", "must"] = "auto"
    save_rollouts_every: NonNegativeInt = 1  # save the rollouts and their texts every n-th iteration; 0: never
    # Use deterministic (bitwise reproducible) kernels wherever there is a choice; slower on a GPU.
    deterministic: bool = False
    # Peak throughput of one device in TFLOP/s (10^12 operations per second), relative to which the metric `mfu` (model
    # FLOPs utilization) is computed. null: the bfloat16 peak of an A100, H100 or H200 for roles in bfloat16; other
    # devices and dtypes log no `mfu`.
    peak_tflops: PositiveFloat | None = None
    # If no phase of an iteration ends within this many seconds, all ranks write their stack traces and exit; 0: never.
    # While the run waits for a usable server, `engine.wait_s` is the limit instead; after this wait, the seconds are
    # counted anew.
    hang_after_s: NonNegativeFloat = 7200.0
    profile: Profile = field(default_factory=Profile)  # traces of torch's profiler

    def problems(self) -> Iterator[str]:
        """Yields an error message if `dir` is not usable as a path, or `name` not as the name of a directory."""
        yield from path_problems("run.dir", self.dir)
        yield from path_problems("run.name", self.name)
        if "/" in self.name or self.name in (".", ".."):
            yield f"run.name = {self.name!r}: give one name, without / and neither . nor ..; run.dir is for directories"


@config
class Launch:
    """Settings of a command that starts its ranks itself, without a launcher such as torchrun or srun."""

    # Number of ranks that the command starts on this host if no launcher (torchrun, srun) has started the ranks.
    nproc: Annotated[PositiveInt, Field(le=1024)] = 1


@config
class JobConfig:
    """The Slurm job of `megatron-rl submit`. A setting that is null has the value in the profile of the site (the
    cluster)."""

    nodes: PositiveInt = 1  # number of nodes of the trainer
    # Time limit of one job of the run in sbatch's format (04:00:00); null: the value in the site's profile
    time: str | None = None
    slices: PositiveInt = 1  # number of consecutive Slurm jobs (slices); each job continues from the newest checkpoint
    # Seconds before the time limit at which the run is asked to save and exit; null: the value in the site's profile.
    warning_s: PositiveInt | None = None
    stalled: PositiveInt = 3  # the job gives up after this many starts in a row without a new checkpoint
    # Time limit of one Slurm job of servers; the job is restarted at the limit; null: the same as `time`
    engine_time: str | None = None


@config
class Preflight:
    """The preflight: checks of the engine and the reward before the first update."""

    num_prompts: PositiveInt = 4  # number of prompts with which the preflight is run
    # Maximum allowed mean of |log-prob of the engine - log-prob of the trainer| over sampled tokens, in nats. null:
    # 0.05, or 0.2 with engine.quantization or an 8-bit engine.kv_cache_dtype.
    max_logprob_gap: NonNegativeFloat | None = None
    reward: bool = True  # check that the reward accepts the prompts' reference answers and rejects a wrong answer
    enabled: bool = True  # false: no checks of the engine and the reward before training

    @property
    def gap_limit(self) -> float:
        """Returns the maximum allowed mean log-prob gap: `max_logprob_gap`, or 0.05 if it is null. 0.05 is the default
        for engines that generate with the trainer's precision."""
        return 0.05 if self.max_logprob_gap is None else self.max_logprob_gap


@config
class Debug:
    """Settings for debugging: training on the saved rollouts of an earlier run."""

    # Directory of a run that saved the rollouts of every iteration. The new run trains on these rollouts and generates
    # none.
    replay: str | None = None


@config
class Sinks:
    """Destinations of the metrics in addition to metrics.jsonl."""

    tensorboard: bool = False  # write TensorBoard files into the run's logs
    wandb_project: str | None = None  # Weights & Biases project that receives the metrics; null: no project
    wandb_entity: str | None = None  # team or user of the W&B project; null: the user that wandb is logged in as
    wandb_tags: tuple[str, ...] = ()  # tags of the W&B run
    # Number of rollouts of each role and iteration whose texts are sent to TensorBoard and Weights & Biases.
    samples: NonNegativeInt = 4
    # Port at which the driver serves GET /metrics in the text format of Prometheus; 0: a free port, which is printed;
    # null: no server.
    prometheus_port: Annotated[NonNegativeInt, Field(le=65535)] | None = None
    prometheus_host: str = "127.0.0.1"  # address at which the metrics server listens; there is no authentication
