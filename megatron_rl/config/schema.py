"""The config of each command as frozen dataclasses. The classes of all sections can be imported from this module.

files.py reads configs; checks.py checks settings against each other. This module imports neither torch nor Megatron, so
a config can be checked on a login node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError, Share, Use, config, path_problems, refuse, sections
from megatron_rl.config.data_sources import SOURCES, Data, Source, Sources
from megatron_rl.config.datasets import Generated, PromptSet, SftData
from megatron_rl.config.engine_kinds import Engine
from megatron_rl.config.engines import Embedded, EndpointConfig, RefitConfig, Rollouts, Servers
from megatron_rl.config.evaluation import (
    NO_SCALE,
    EvalConfig,
    Evaluation,
    EvaluationSet,
    GradingConfig,
    JudgingConfig,
    Reward,
)
from megatron_rl.config.model import (
    CORRECTION_AHEAD,
    REWARD_OBJECTIVES,
    CorrectionConfig,
    Layout,
    Lora,
    LossConfig,
    MeanTokens,
    Model,
    Optimizer,
    RoleConfig,
    SamplingConfig,
    Strategy,
    TandemConfig,
)
from megatron_rl.config.other_names import RecipeUse
from megatron_rl.config.run import Debug, JobConfig, Launch, Preflight, Run, Sinks

HELD_OUT = "evaluation.sets"  # the setting that names the sets of held-out problems

# Settings that a role keeps when it shares another role's policy (`same_as`). Other settings are copied from that role.
OF_A_SHARED_ROLE = ("same_as", "chat", "sampling", "max_prompt_tokens", "tandem", "data", "mean_tokens")

OF_A_SHARED_CRITIC = ("same_as", "head", "tandem", "data")  # settings that a critic keeps when it shares a policy


@config
class Stage:
    """A part of a run that overrides settings. A stage begins where the previous stage ends; the first stage begins at
    the start of the run."""

    until: PositiveInt  # the stage ends after this number of iterations of the run
    # {dotted name of a setting: value in this stage}, such as {roles.generator.sampling.max_tokens: 8192}
    overrides: dict[str, Any]


@config
class TrainConfig:
    """The config of reinforcement learning: `megatron-rl train`."""

    roles: dict[str, RoleConfig]  # the models that generate rollouts, by the role names that the recipe uses
    families: tuple[str, ...] = ()  # your own model families, as package.module:FAMILY (docs/how_to/adding_a_model.md)
    recipe: RecipeUse  # the algorithm: which role generates and which role is trained in each iteration
    data: Data  # the problems to train on: one set, or several `sources`
    evaluation: Evaluation = field(default_factory=Evaluation)  # measurements on held-out problems
    # The engine that writes rollouts.
    engine: Engine = field(default_factory=Embedded)
    reward: Reward = field(default_factory=Reward)  # the function that grades answers
    run: Run = field(default_factory=Run)  # length, directory and checkpoints
    launch: Launch = field(default_factory=Launch)  # number of ranks to start
    refit: RefitConfig = field(default_factory=RefitConfig)  # transfer of new weights to the engines
    rollouts: Rollouts = field(default_factory=Rollouts)  # generation of rollouts during training
    preflight: Preflight = field(default_factory=Preflight)  # checks before the first update
    # Consecutive parts of the run that override settings. Iterations after the last stage use the settings without the
    # overrides of any stage.
    stages: tuple[Stage, ...] = ()
    debug: Debug = field(default_factory=Debug)  # training on the saved rollouts of an earlier run
    sinks: Sinks = field(default_factory=Sinks)  # destinations of the metrics in addition to metrics.jsonl
    job: JobConfig = field(default_factory=JobConfig)  # the Slurm job

    def problems(self) -> Iterator[str]:
        """Yields error messages about stages that are not in increasing order, about a `same_as` that names a role
        whose policy cannot be shared, and about a `value_coef` without a critic that shares the policy."""
        for number, (earlier, stage) in enumerate(itertools.pairwise(self.stages), start=1):
            if stage.until <= earlier.until:
                yield f"stages[{number}].until = {stage.until}: the stage before it ends at {earlier.until}; give more"
        for name, role in self.roles.items():
            owner = self.roles.get(role.same_as or name)
            if owner is None or role.same_as is not None and owner.same_as is not None:
                yield (
                    f"roles.{name}.same_as = {role.same_as!r}: name another role that shares nobody's policy itself; "
                    f"the roles are {', '.join(self.roles)}"
                )
            elif role.head == "value" and owner.head is None and not owner.loss.value_coef:
                yield (
                    f"roles.{name}.head = 'value' with same_as = {role.same_as!r}: set roles.{role.same_as}.loss."
                    "value_coef, the weight of the value loss in that policy's update, to a number above 0"
                )
            elif role.head not in (None, owner.head) and (role.head, owner.head) != ("value", None):
                yield (
                    f"roles.{name}.head = {role.head!r} with same_as = {role.same_as!r}: only a value head can share "
                    "the policy of a language model; leave same_as out and set model.path, or leave head out"
                )
            elif role.tandem is not None and owner.tandem is None:
                yield (
                    f"roles.{name}.tandem with same_as = {role.same_as!r}: that role's engines hold no junior; set "
                    f"roles.{role.same_as}.tandem too, or leave this one out"
                )
        shared = {role.same_as for role in self.roles.values() if role.head == "value"}
        for name, role in self.roles.items():
            if role.loss.value_coef and role.head is None and role.same_as is None and name not in shared:
                yield (
                    f"roles.{name}.loss.value_coef = {role.loss.value_coef}, and no role with head = 'value' has "
                    f"same_as = {name!r}: add such a critic, or leave value_coef out"
                )

    def __post_init__(self) -> None:
        """Copies the model and training settings of a role to the roles that share its policy (`same_as`)."""
        refuse(*self.problems())
        roles = dict(self.roles)
        for name, role in self.roles.items():
            if role.same_as is None:
                continue
            owner = roles[role.same_as]
            kept = OF_A_SHARED_ROLE if role.head in (None, owner.head) else OF_A_SHARED_CRITIC
            roles[name] = replace(owner, **{setting: getattr(role, setting) for setting in kept})
        object.__setattr__(self, "roles", roles)

    @property
    def directory(self) -> Path:
        """Returns the run directory."""
        return Path(self.run.dir) / self.run.name


@config
class SftLoss:
    """The loss of `megatron-rl sft`. It determines which keys the rows of data need (docs/how_to/preferences.md)."""

    # nll: negative log-likelihood of the responses. dpo, dpo_norm, ipo, simpo: preference pairs. kto: responses with a
    # label. a_lol, rwr: responses with a reward. bradley_terry: train a reward model on preference pairs. prm: train a
    # process reward model on labelled steps (docs/how_to/reward_models.md). Other values: module:name of your own.
    objective: str = "nll"
    objective_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the objective, such as beta
    # true: compute the reference model's log-probs of all rows once, before the first step, and store them in the run
    # directory; saves time if rows are trained on more than once. false: compute the log-probs before each step.
    precompute_ref_log_probs: bool = False


@config
class SftConfig:
    """The config of supervised fine-tuning and preference learning: `megatron-rl sft`. The trained model is saved as a
    Hugging Face directory at dir/name/model."""

    model: Model  # the model to train
    families: tuple[str, ...] = ()  # your own model families, as package.module:FAMILY (docs/how_to/adding_a_model.md)
    data: SftData  # prompt/response pairs
    loss: SftLoss = field(default_factory=SftLoss)  # what is minimised
    layout: Layout = field(default_factory=Layout)  # how the model is divided among the ranks
    # Train adapters (LoRA) instead of the model's weights; null: train the model's weights. The adapter is saved in
    # dir/name/adapter, and the model with the merged adapter in dir/name/model.
    lora: Lora | None = None
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=5e-6))  # Adam and its learning rate
    # Rows of the data per optimizer step. Every epoch trains each row once; its last step has the rest of the rows.
    samples_per_step: PositiveInt = 64
    steps: PositiveInt | None = None  # number of optimizer steps; null: `epochs` passes over the data
    epochs: PositiveFloat = 1.0  # passes over the data if `steps` is null
    validate_every: NonNegativeInt = 100  # optimizer steps between validations; 0: only at the end
    # Maximum size of a micro-batch, in tokens; at least data.max_tokens, and twice as much for preference pairs.
    micro_batch_tokens: PositiveInt = 8192
    # Compute the prompt of a preference pair once for both responses (docs/reference/layouts.md). Needs cp = 1.
    shared_prefixes: bool = False
    run: Run = field(default_factory=lambda: Run(name="sft", save_every=100))  # directory and checkpoints
    launch: Launch = field(default_factory=Launch)  # number of ranks to start
    sinks: Sinks = field(default_factory=Sinks)  # destinations of the metrics in addition to metrics.jsonl
    job: JobConfig = field(default_factory=JobConfig)  # the Slurm job

    @property
    def directory(self) -> Path:
        """Returns the run directory."""
        return Path(self.run.dir) / self.run.name

    @property
    def trained(self) -> RoleConfig:
        """Returns the settings of the model and of its training in the form of a RoleConfig, as in reinforcement
        learning."""
        return RoleConfig(
            model=self.model,
            layout=self.layout,
            lora=self.lora,
            optimizer=self.optimizer,
            head="score" if self.loss.objective in REWARD_OBJECTIVES else None,
            loss=LossConfig(objective=self.loss.objective, objective_args=self.loss.objective_args, kl_coef=0.0),
            micro_batch_tokens=self.micro_batch_tokens,
            shared_prefixes=self.shared_prefixes,
        )


@config
class GenerateConfig:
    """The config of `megatron-rl generate`, which makes SFT data with a teacher model: train.parquet and
    validation.parquet."""

    model: Model  # the teacher
    families: tuple[str, ...] = ()  # your own model families, as package.module:FAMILY (docs/how_to/adding_a_model.md)
    data: PromptSet  # the problems that the teacher answers
    # Text file with the prompt template, which contains {question}, or the name of a packaged prompt. Problems that are
    # conversations need no template.
    template: str | None = None
    # Send the prompt as a user message in the teacher's chat template. The prompts in the saved pairs do not contain
    # the chat template.
    chat: bool = False
    # Maximum number of tokens of a prompt, including the chat template. Longer prompts are left out; null: no limit.
    max_prompt_tokens: PositiveInt | None = None
    output: str  # directory of train.parquet and validation.parquet
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # sampling of the answers
    n: PositiveInt = 1  # answers to each problem
    seed: int = 0  # seed of all random numbers
    validation_share: Share = 0.02  # fraction of the problems whose answers go into validation.parquet
    # What happens to answers that were truncated at sampling.max_tokens. false: they go into truncated.parquet.
    # true: they are treated like complete answers, as in the code release of RL Tango.
    keep_truncated: bool = False
    # The function that grades the answers. Wrong answers go into wrong.parquet, answers that could not be graded into
    # ungraded.parquet. null: no answer is graded, so that wrong answers are among the pairs.
    reward: Reward | None = None
    # The engine that generates the answers. The embedded engine holds the whole teacher on every rank.
    engine: Engine = field(default_factory=Embedded)
    launch: Launch = field(default_factory=Launch)  # number of ranks to start
    # The Slurm job. Only its settings `nodes`, `time` and `warning_s` are used. On several nodes, one rank of each node
    # starts engine.replicas / job.nodes servers, which use the node's GPUs with the indices in engine.gpus.
    job: JobConfig = field(default_factory=JobConfig)

    def problems(self) -> Iterator[str]:
        """Yields an error message if `output` is not a usable path, or if it is unknown which answers are correct."""
        yield from path_problems("output", self.output)
        if self.reward is not None and self.reward.threshold is None:
            yield f"{NO_SCALE}, so that wrong answers can be set aside"

    @property
    def directory(self) -> Path:
        """Returns the directory that contains `output`."""
        return Path(self.output).parent


def models_of(config: TrainConfig | SftConfig | EvalConfig | GenerateConfig) -> dict[str, Model]:
    """Returns {dotted name of the setting: model settings} of the models whose files a command reads. An example of a
    name is `roles.solver.model`. Roles that share another role's model are left out, and so are roles that have an
    endpoint and no model path."""
    roles = config.roles if isinstance(config, TrainConfig) else {}
    without = {name for name, role in roles.items() if role.same_as or (role.endpoint and not role.model.path)}
    left_out = {f"roles.{name}.model" for name in without}
    return {name: model for name, model in sections(config, Model).items() if name not in left_out}
