"""Settings of rewards, of the evaluations during a run, and of the command `megatron-rl eval`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import Share, config, not_finite, path_problems
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engine_kinds import Engine
from megatron_rl.config.engines import Embedded
from megatron_rl.config.model import Model, SamplingConfig
from megatron_rl.config.run import Launch


@config
class Evaluation:
    """Settings of the evaluations on held-out problems during a training run."""

    prompts: PromptSet | None = None  # the held-out problems; null: no evaluation
    every: NonNegativeInt = 0  # iterations between evaluations; 0: only at the end
    at_start: bool = True  # true: evaluate before the first iteration in addition to the later evaluations
    num_prompts: PositiveInt = 256  # number of problems of one evaluation


@config
class Reward:
    """A reward function and the worker processes that run it. The function gets (response, payload of the problem) and
    returns a float in `range`."""

    target: str = "megatron_rl.rewards.math_answer:grade"  # the function's name as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the function
    # Lowest and highest score that the function may return. Any other score is treated as a failed grading, and is an
    # error in the preflight (the checks before training). A score above the midpoint of the range is considered
    # correct.
    range: tuple[float, float] = (0.0, 1.0)
    workers: PositiveInt = 2  # number of worker processes
    # Timeout of one answer in seconds; a worker that takes longer is killed. For a function that grades batches the
    # timeout is multiplied by the batch size; if the batch times out or raises, its answers are graded one by one.
    timeout_s: PositiveFloat = 5.0
    memory_mib: PositiveInt = 2048  # memory limit of one worker, in MiB
    # What happens to an answer whose grading was cut off (by the time limit, the memory limit or a crash) although the
    # problem's reference answer is graded without error. wrong: the answer gets the lowest score. drop: the answer is
    # removed from its group. In both cases the answer is not included in max_failure_share.
    cut_off: Literal["wrong", "drop"] = "wrong"
    max_failure_share: Share = 0.05  # stop the run if a larger fraction of an update's gradings or episodes fails twice
    # An answer that is wrong for every problem. The preflight before training checks that the reward function rejects
    # this answer.
    wrong_answer: str = "-123456.789"
    # Format of the response that the preflight before training grades; {answer} is replaced by the answer.
    answer_format: str = "<answer>\\boxed{{answer}}</answer>"

    @property
    def threshold(self) -> float:
        """Returns the score above which an answer is considered correct: the midpoint of `range`."""
        return (self.range[0] + self.range[1]) / 2

    def problems(self) -> Iterator[str]:
        """Yields error messages about the arguments, the range of scores and the format of the answer."""
        yield from not_finite(self.args, "reward.args")
        if not self.range[0] < self.range[1]:
            yield f"reward.range = {list(self.range)}: give the least score, then a greater one"
        if "{answer}" not in self.answer_format:
            yield f"reward.answer_format = {self.answer_format!r}: it needs {{answer}} where the answer stands"


@config
class JudgingConfig:
    """A verifier model that scores the generator's samples, for best-of-n and weighted majority votes."""

    model: Model  # the verifier model
    template: str = "tango_verifier"  # name or file of the verifier's prompt template
    chat: bool = False  # send the prompt as a user message in the verifier's chat template
    votes: PositiveInt = 1  # number of verifications of each sample
    # Two answers to the template's question whether a solution is correct, such as [Yes, No]. A sample's weight is then
    # P(yes) / (P(yes) + P(no)), the verifier's probabilities directly after the prompt. null: weigh by votes.
    yes_no: tuple[str, str] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # sampling parameters of the verifications


@config
class GradingConfig:
    """The config of the command `megatron-rl eval --completions`, which grades existing completions."""

    benchmark: str | None = None  # name of the benchmark whose grader is used; null: the function in `reward`
    reward: Reward = field(default_factory=lambda: Reward(workers=1))  # the grader and its worker processes


@config
class EvalConfig:
    """The config of `megatron-rl eval`, which measures a model on problem sets."""

    # The model to measure. For problem sets it is the generator; for sets of solutions (processbench_*) the verifier;
    # for the measure handoff the model that begins.
    model: Model
    families: tuple[str, ...] = ()  # model families of your own, as package.module:FAMILY (docs/adding_a_model.md)
    benchmarks: tuple[str, ...] = ()  # names of benchmarks, see docs/evaluation.md
    # Directory with local files of the benchmarks: a directory of your own, or DIR/datasets after `megatron-rl fetch
    # --to DIR`. null: load the benchmarks from the Hugging Face hub.
    data_dir: str | None = None
    data: PromptSet | None = None  # a problem set of your own, graded by `reward`
    limit: PositiveInt | None = None  # maximum number of problems of each benchmark; null: all problems
    # Name or file of the prompt template; null: the benchmark's template, and tango_generator for `data`.
    template: str | None = None
    # Send the prompt as a user message in the tokenizer's chat template. Conversations of `data` always use it.
    chat: bool = False
    # File NAME.json for the metrics. The samples are written to NAME.jsonl and the report to NAME.html.
    output: str | None = None
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))  # sampling of the answers
    # Maximum number of tokens of prompt plus answer; max_tokens is lowered to context - prompt - 8 if necessary. null:
    # no limit.
    context: PositiveInt | None = None
    n: PositiveInt = 1  # number of samples of each problem
    k: tuple[PositiveInt, ...] = (1,)  # the values of k for which pass@k is reported
    seed: int = 0  # seed of all random numbers
    # What is measured. solve: the model's answers to problems. handoff: answers that two models write in turns.
    # legibility: the junior's cross-entropy on the answers of solve. drift: the KL divergence of junior and base from
    # the model on these answers.
    measures: tuple[Literal["solve", "handoff", "legibility", "drift"], ...] = ("solve",)
    junior: Model | None = None  # the second model of the measures handoff, legibility and drift
    # Measure handoff: maximum number of rounds of one answer; in a round, each of the two models writes one turn
    max_rounds: PositiveInt = 150
    verifier: JudgingConfig | None = None  # a verifier model that scores the samples; null: no verifier
    base: Model | None = None  # the model before training, for drift
    # The reward function that grades answers to the problems in `data`. Its settings `workers`, timeouts and memory
    # limit are used for the graders of the benchmarks as well.
    reward: Reward = field(default_factory=Reward)
    # The engine that generates the answers.
    engine: Engine = field(default_factory=Embedded)
    launch: Launch = field(default_factory=Launch)  # number of ranks to start

    def problems(self) -> Iterator[str]:
        """Yields error messages about measures, benchmarks and samples that do not fit each other."""
        if self.reward.range != (0.0, 1.0):
            yield f"reward.range = {list(self.reward.range)}: an evaluation counts scores from 0 to 1"
        if not self.benchmarks and self.data is None:
            yield (
                "benchmarks = [] without data: name benchmarks (gsm8k, amc23, ...), or give a problem set of your own "
                "by data.path"
            )
        if self.limit is not None and not self.benchmarks:
            yield f"limit = {self.limit} is of benchmarks, and none is named: a set of your own has data.limit"
        if too_large := [k for k in self.k if k > self.n]:
            yield f"k = {list(self.k)} with n = {self.n}: pass@{too_large[0]} needs as many samples; raise n"
        if self.junior is None and (missing := [m for m in self.measures if m != "solve"]):
            yield f"measures = {list(self.measures)}: {missing[0]} needs a second model; set junior.path"
        if {"legibility", "drift"} & set(self.measures) and "solve" not in self.measures:
            yield (
                f"measures = {list(self.measures)}: legibility and drift read the texts that solve writes; add solve"
            )
        if self.output is not None:
            yield from path_problems("output", self.output)
        if self.output is not None and not self.output.endswith(".json"):
            yield f"output = {self.output!r}: give NAME.json; NAME.jsonl and NAME.html go beside it"

    @property
    def directory(self) -> Path:
        """Returns the directory that contains `output`."""
        return Path(self.output or ".").parent
