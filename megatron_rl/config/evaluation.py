"""Settings of rewards, of the evaluations during a run, and of the command `megatron-rl eval`."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import ConfigError, Share, check_path, config
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engine_kinds import Engine
from megatron_rl.config.engines import Embedded
from megatron_rl.config.model import Model, SamplingConfig
from megatron_rl.config.run import Launch


@config
class Evaluation:
    """The evaluations on held-out problems during a training run."""

    prompts: PromptSet | None = None  # the held-out problems; null: no evaluation
    every: NonNegativeInt = 0  # iterations between evaluations; 0: only at the end
    at_start: bool = True  # evaluate before the first iteration, too
    num_prompts: PositiveInt = 256  # problems of one evaluation


@config
class Reward:
    """A reward function, (response, payload) -> float in `range`, and the worker processes that run it."""

    target: str = "megatron_rl.rewards.math_answer:grade"  # the function's name as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments for it
    # Least and greatest score that the function may return. Any other one is a failed grading, and refused at the
    # preflight. A score above the middle counts as correct.
    range: tuple[float, float] = (0.0, 1.0)
    workers: PositiveInt = 2  # worker processes
    # Seconds for one answer; a worker that takes longer is killed. A function of batches has as many times that as the
    # batch has answers, and answers of a batch that is late or raises are graded one by one.
    timeout_s: PositiveFloat = 5.0
    memory_mib: PositiveInt = 2048  # memory limit of one worker, in MiB
    # What becomes of an answer whose grading is cut off (by time, memory or a crash), although the problem's own answer
    # is graded well. wrong: it gets the least score, as a text that nobody can check. drop: it leaves its group.
    # Neither counts as a failure of the reward.
    cut_off: Literal["wrong", "drop"] = "wrong"
    max_failure_share: Share = 0.05  # stop the run when a larger share of an update's gradings fails
    # an answer that is wrong for every problem; the preflight before training grades it
    wrong_answer: str = "-123456.789"
    # The response that the preflight before training grades; {answer} is replaced by the answer.
    answer_format: str = "<answer>\\boxed{{answer}}</answer>"

    @property
    def threshold(self) -> float:
        """Returns the score above which an answer counts as correct."""
        return (self.range[0] + self.range[1]) / 2

    def __post_init__(self) -> None:
        if not self.range[0] < self.range[1]:
            raise ConfigError(f"reward.range = {list(self.range)}: give the least score, then a greater one")
        if "{answer}" not in self.answer_format:
            raise ConfigError(
                f"reward.answer_format = {self.answer_format!r}: it needs {{answer}} where the answer stands"
            )


@config
class JudgingConfig:
    """A verifier that weighs a generator's samples, for best of n and weighted votes."""

    model: Model  # the verifier
    template: str = "tango_verifier"  # name or file of its prompt
    chat: bool = False  # put the prompt as a user's message into the verifier's own chat template
    votes: PositiveInt = 1  # verifications of each sample
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # sampling of the verifications


@config
class GradingConfig:
    """Grade given completions: `megatron-rl eval --completions`."""

    benchmark: str | None = None  # name of the benchmark whose grader is used; null: `reward`
    reward: Reward = field(default_factory=lambda: Reward(workers=1))  # the grader and its worker processes


@config
class EvalConfig:
    """Measure a model on problem sets: `megatron-rl eval`."""

    # The measured model: the generator; for sets of solutions (processbench_*) the verifier; for handoff the one that
    # begins.
    model: Model
    families: tuple[str, ...] = ()  # model families of your own, as package.module:FAMILY (docs/adding_a_model.md)
    benchmarks: tuple[str, ...] = ()  # names of benchmarks, see docs/evaluation.md
    # Directory with local files of the benchmarks: one of your own, or DIR/datasets of `megatron-rl fetch --to DIR`.
    # null: the Hugging Face hub.
    data_dir: str | None = None
    data: PromptSet | None = None  # a problem set of your own, graded by `reward`
    limit: PositiveInt | None = None  # largest number of problems of each benchmark; null: all
    template: str | None = None  # name or file of the prompt; null: the benchmark's own, and tango_generator for `data`
    # Put the prompt as a user's message into the tokenizer's chat template. Conversations of `data` need no setting.
    chat: bool = False
    # NAME.json for the metrics. Beside it NAME.jsonl gets every sample, and NAME.html the report.
    output: str | None = None
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))  # sampling of the answers
    # Most tokens of prompt and answer together; max_tokens is lowered to context - prompt - 8 where needed. null: no
    # limit.
    context: PositiveInt | None = None
    n: PositiveInt = 1  # samples of each problem
    k: tuple[PositiveInt, ...] = (1,)  # the values of k for which pass@k is reported
    seed: int = 0  # seed of all draws
    # What is measured. solve: answers to problems. handoff: answers that two models write in turns. legibility: how
    # hard the junior finds the texts of solve to predict (cross-entropy). drift: how far junior and base are from the
    # model on these texts (KL).
    measures: tuple[Literal["solve", "handoff", "legibility", "drift"], ...] = ("solve",)
    junior: Model | None = None  # the other model of handoff, legibility and drift
    base: Model | None = None  # the model that training began from, for drift
    max_rounds: PositiveInt = 150  # most rounds of one hand-off; in a round each of the two models has one turn
    verifier: JudgingConfig | None = None  # a verifier that weighs the samples; null: none
    # The grader of `data`. Its workers and limits are those of every benchmark's grader, too.
    reward: Reward = field(default_factory=Reward)
    # The engine that writes the answers.
    engine: Engine = field(default_factory=Embedded)
    launch: Launch = field(default_factory=Launch)  # number of ranks to start

    def __post_init__(self) -> None:
        if self.reward.range != (0.0, 1.0):
            raise ConfigError(f"reward.range = {list(self.reward.range)}: an evaluation counts scores from 0 to 1")
        if not self.benchmarks and self.data is None:
            raise ConfigError(
                "benchmarks = [] without data: name benchmarks (gsm8k, amc23, ...), or give a problem set of your own "
                "by data.path"
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
                f"measures = {list(self.measures)}: legibility and drift read the texts that solve writes; add solve"
            )
        if self.output is not None:
            check_path("output", self.output)
        if self.output is not None and not self.output.endswith(".json"):
            raise ConfigError(f"output = {self.output!r}: give NAME.json; NAME.jsonl and NAME.html go beside it")

    @property
    def directory(self) -> Path:
        """Returns the directory that the output lies in."""
        return Path(self.output or ".").parent

    @property
    def models(self) -> dict[str, Model]:
        """Returns {setting: section} of the models that the evaluation reads."""
        judging = None if self.verifier is None else self.verifier.model
        found = {"model": self.model, "junior": self.junior, "verifier.model": judging, "base": self.base}
        return {name: model for name, model in found.items() if model is not None}

    @property
    def sets(self) -> dict[str, PromptSet]:
        """Returns {setting: section} of the problem set of the user's own, where there is one."""
        return {} if self.data is None else {"data": self.data}
