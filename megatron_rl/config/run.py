"""Settings of a run as a whole: its length, directory and checkpoints, its ranks, its Slurm job, and its checks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError, check_path, config


@config
class Run:
    """The length of a run, its directory and its checkpoints.

    An iteration of `sft` is an optimizer step.
    """

    name: str = "run"  # name of the run
    dir: str = "runs"  # the run directory is dir/name
    seed: int = 0  # seed of all random numbers of the run
    iterations: PositiveInt | None = None  # of the run; null: as many as the recipe plans; fewer end it early
    prompts_per_iteration: PositiveInt = 256  # P, prompts of every iteration
    # What happens to an update whose advantages are all 0. false: it is skipped. true: the optimizer takes its steps
    # all the same, by the KL term, the entropy bonus, weight decay and momentum, as the release of RL Tango does.
    train_without_signal: bool = False
    save_every: NonNegativeInt = 50  # iterations between checkpoints; 0: only at the end
    keep: PositiveInt = 2  # number of newest checkpoints that are kept
    # Write checkpoints while training goes on, by processes that hold a copy; training waits for the first one.
    async_save: bool = False
    # auto: continue a run that is there, else begin. never: refuse to start where a run is. must: refuse where none is;
    # accept changes.
    resume: Literal["auto", "never", "must"] = "auto"
    save_rollouts_every: NonNegativeInt = 1  # keep the rollouts of every n-th iteration, with their texts; 0: none
    # Use only kernels that give the same bits every time, where there is a choice; slower on a GPU.
    deterministic: bool = False
    # Operations a second of one device at its best, in 10^12, that `mfu` is a share of. null: the bfloat16 peak of an
    # A100, H100 or H200 for roles in bfloat16; for other devices and dtypes no `mfu` is logged.
    peak_tflops: PositiveFloat | None = None
    # Seconds without the end of any phase of an iteration after which all ranks write their stacks and end; 0: never.
    # While no server can be used, `engine.wait_s` is the limit, and these seconds count from the end of that wait.
    hang_after_s: NonNegativeFloat = 7200.0

    def __post_init__(self) -> None:
        check_path("run.dir", self.dir)
        check_path("run.name", self.name)
        if "/" in self.name or self.name in (".", ".."):
            raise ConfigError(
                f"run.name = {self.name!r}: give one name, without / and neither . nor ..; run.dir is for directories"
            )


@config
class Launch:
    """The number of ranks to start when no launcher does."""

    # ranks that are started here when no launcher (torchrun, srun) started them
    nproc: Annotated[PositiveInt, Field(le=1024)] = 1


@config
class JobConfig:
    """The run on a Slurm cluster, for `megatron-rl submit`. The site's profile has its own values; null takes those."""

    nodes: PositiveInt = 1  # nodes of the trainer
    time: str | None = None  # time limit of one slice, as sbatch takes it (04:00:00); null: as the profile has it
    slices: PositiveInt = 1  # number of time slices, one after the other; each goes on from the newest checkpoint
    # Seconds before the time limit at which the run is asked to save and leave; null: as the profile has it.
    warning_s: PositiveInt | None = None
    stalled: PositiveInt = 3  # starts in a row without a new checkpoint after which the job gives up
    engine_time: str | None = None  # time limit of one server, which is then started again; null: as `time`


@config
class Preflight:
    """The preflight before training: what must hold before the first update."""

    num_prompts: PositiveInt = 4  # prompts that the preflight tries
    max_logprob_gap: NonNegativeFloat = 0.05  # largest mean |engine - trainer| log-prob of sampled tokens, in nats
    reward: bool = True  # try the reward on the prompts' own answers and on a wrong one; false: not
    enabled: bool = True  # false: begin without any of these checks


@config
class Debug:
    """Replaying of rollouts, to look for faults."""

    replay: str | None = None  # a run that kept every iteration: train on its rollouts instead of asking an engine


@config
class Sinks:
    """Further places that receive the metrics, beside metrics.jsonl."""

    tensorboard: bool = False  # write TensorBoard files into the run's logs
    wandb_project: str | None = None  # project of Weights & Biases that receives the metrics; null: none
    wandb_entity: str | None = None  # team or user of that project; null: the one that wandb is logged in as
    wandb_tags: tuple[str, ...] = ()  # tags of the run there
    # rollouts of each role and iteration that TensorBoard and Weights & Biases get as texts
    samples: NonNegativeInt = 4
    # Port at which the driver answers GET /metrics in the text format of Prometheus; 0: a free one, which it prints;
    # null: none.
    prometheus_port: Annotated[NonNegativeInt, Field(le=65535)] | None = None
    prometheus_host: str = "127.0.0.1"  # address at which it listens; nobody is asked who they are
