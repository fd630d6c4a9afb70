"""Settings of rewards, of the evaluations during a run, and of the command `megatron-rl eval`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.base import PositiveShare, Share, config, not_finite, path_problems
from megatron_rl.config.datasets import PromptSet
from megatron_rl.config.engine_kinds import Engine
from megatron_rl.config.engines import Embedded
from megatron_rl.config.model import Model, SamplingConfig
from megatron_rl.config.run import Launch

# The reward that is the weighted sum of several functions; see rewards/reward_functions.py
REWARD_FUNCTIONS = "megatron_rl.rewards.reward_functions:RewardFunctions"
# Names of metrics that need to know which answers are correct, up to a suffix such as _greedy
OF_CORRECT = re.compile(r"(accuracy|pass@\d+|maj@\d+|best_of_\d+|vote_of_\d+)(_greedy)?")
NO_SCALE = (
    "reward.range is not set, and a sum of reward functions may be any number: set it to the lowest and highest reward"
)


@config
class Reward:
    """A reward function and the worker processes that run it. The function is called with a response and the problem's
    payload (its fields, such as the answer), and returns a float in `range`."""

    target: str = "megatron_rl.rewards.math_answer:grade"  # the function's name as package.module:name
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the function
    # Lowest and highest score that the function may return. An answer is correct if its score is above their midpoint.
    # A score outside the range is a failed grading, and is an error in the preflight (the checks before training).
    # null: 0 and 1; for RewardFunctions, any numbers. An evaluation of RewardFunctions then has no accuracy if a score
    # is outside of 0 to 1, and whatever needs to know which answers are correct is refused.
    range: tuple[float, float] | None = None
    workers: PositiveInt = 2  # number of worker processes
    # Timeout of one answer in seconds; a worker that takes longer is killed. For a function that grades batches, the
    # timeout is multiplied by the batch size. If a batch times out or raises, its answers are graded one by one.
    timeout_s: PositiveFloat = 5.0
    memory_mib: PositiveInt = 2048  # memory limit of one worker, in MiB
    # What happens to an answer whose grading was cut off twice (by the time limit, the memory limit or a crash) while
    # the problem's reference answer is graded without error. wrong: the answer gets the lowest score. drop: the answer
    # is removed from its group of samples. In both cases it is counted in the metric graded/cut_off, and it counts
    # towards max_failure_share, because a service that hangs for some answers looks the same.
    cut_off: Literal["wrong", "drop"] = "wrong"
    # Maximum fraction of an update's gradings or episodes that may fail or be cut off, counted after failed ones were
    # tried a second time. If more fail, the run stops.
    max_failure_share: Share = 0.05
    # An answer that is wrong for every problem. The preflight before training checks that the reward function rejects
    # this answer.
    wrong_answer: str = "-123456.789"
    # Response that the preflight before training grades: {answer} is replaced by the reference answer of a problem, or
    # by `wrong_answer`.
    answer_format: str = "<answer>\\boxed{{answer}}</answer>"

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns the lowest and the highest score; [0, 1] if the setting `range` is null."""
        return self.range or (0.0, 1.0)

    @property
    def threshold(self) -> float | None:
        """Returns the score above which an answer is considered correct: the midpoint of `range`. Returns None if no
        scale is declared: the target is RewardFunctions, and `range` is null."""
        return None if self.range is None and self.target == REWARD_FUNCTIONS else sum(self.bounds) / 2

    def problems(self) -> Iterator[str]:
        """Yields error messages about the arguments, the range of scores and the format of the answer."""
        yield from not_finite(self.args, "reward.args")
        if not self.bounds[0] < self.bounds[1]:
            yield f"reward.range = {list(self.bounds)}: give the least score, then a greater one"
        if "{answer}" not in self.answer_format:
            yield f"reward.answer_format = {self.answer_format!r}: it needs {{answer}} where the answer stands"


@config
class EvaluationSet(PromptSet):
    """A set of problems on which a model is evaluated: a benchmark (`name`), or problems of your own (`path`). For a
    setting that is null, the evaluation's setting with the same name is used. During training, a set of your own with
    neither `fields` nor `settings` inherits `data.fields`."""

    path: str = ""  # file, directory or hub name of the problems (see data.path); empty: the benchmark `name`
    # Name of the benchmark (docs/how_to/evaluation.md). With `path`: the set's name in metrics; default: the file name.
    name: str = ""
    split: str = "test"  # split of a set of your own (see data.split)
    shuffle: bool = False  # put the problems in random order
    # The reward function that grades the answers to this set. null: the benchmark's grader, or the config's section
    # `reward` for problems of your own.
    reward: Reward | None = None
    # Prompt template of this set: a text file with {question}, or the name of a packaged template (such as
    # tango_generator). null: the evaluation's setting `template`.
    template: str | None = None
    n: PositiveInt | None = None  # number of samples of each problem
    k: tuple[PositiveInt, ...] | None = None  # the values of k for which pass@k is reported
    temperature: NonNegativeFloat | None = None  # sampling temperature; 0: greedy decoding
    # Sample only from the most likely tokens whose total probability reaches this value; 1: all tokens.
    top_p: PositiveShare | None = None
    top_k: NonNegativeInt | None = None  # sample only from this many most likely tokens; 0: all tokens

    def problems(self) -> Iterator[str]:
        """Yields an error message if the set has neither a name nor a path, and another one if the name has a character
        that is not allowed in names of metrics."""
        if not (self.path or self.name):
            yield "sets: a set has neither name nor path: name a benchmark (gsm8k, amc23, ...), or give a path"
        if not re.fullmatch(r"[\w.-]*", self.name):
            yield f"sets: name = {self.name!r}: give a name of letters, digits and . _ -"

    @property
    def title(self) -> str:
        """Returns the name of the set in metrics: `name`, or by default the file name of `path` without its suffix. For
        a file test.* or train.*, the default is the name of the file's directory.
        """
        path = Path(self.path)
        plain = path.stem in ("test", "train") and path.parent.name
        return self.name or re.sub(r"[^\w.-]", "_", path.parent.name if plain else path.stem)


Named = Annotated[
    Annotated[str, pydantic.Tag("(name)")] | Annotated[EvaluationSet, pydantic.Tag("(set)")],
    pydantic.Discriminator(lambda entry: "(name)" if isinstance(entry, str) else "(set)"),
]
Sets = tuple[Named, ...]  # a string is the name of a benchmark


@config
class Best:
    """The rule by which the best checkpoints of a run are chosen. The best checkpoints are kept in addition to the
    newest `run.keep` checkpoints, and their models are exported to RUN/best.
    """

    metric: str  # name of a metric of the evaluations, such as generator/pass@4 or generator/math500/accuracy
    mode: Literal["max", "min"] = "max"  # whether a higher or a lower value is better
    keep: PositiveInt = 1  # number of best checkpoints to keep


@config
class EarlyStop:
    """The condition that ends a run before its last iteration: a metric of the evaluations no longer improves."""

    metric: str  # name of a metric of the evaluations, such as generator/accuracy
    mode: Literal["max", "min"] = "max"  # whether a higher or a lower value is better
    patience: PositiveInt = 3  # number of evaluations in a row without a new best value that end the run


@config
class Evaluation:
    """Settings of the evaluations during a training run."""

    # The problem sets: names of benchmarks, or mappings such as {name: mine, path: my.jsonl, n: 4, k: [1, 4]}.
    # docs/how_to/evaluation.md has all keys. []: no evaluation.
    sets: Sets = ()
    # Directory with local files of the sets: a directory of your own, or DIR/datasets after the command
    # `megatron-rl fetch --to DIR`. null: sets that are not local files are loaded from the Hugging Face hub.
    data_dir: str | None = None
    # Iterations between evaluations; 0: evaluate only at the end, and at the start if at_start is true
    every: NonNegativeInt = 0
    at_start: bool = True  # true: evaluate before the first iteration in addition to the later evaluations
    limit: PositiveInt | None = None  # maximum number of problems of each set; null: all problems
    n: PositiveInt = 1  # number of samples of each problem
    k: tuple[PositiveInt, ...] = (1,)  # the values of k for which pass@k is reported
    temperature: NonNegativeFloat = 1.0  # sampling temperature; 0: greedy decoding
    # Sample only from the most likely tokens whose total probability reaches this value; 1: all tokens.
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0  # sample only from this many most likely tokens; 0: all tokens
    # If the temperature is above 0, also generate one greedy answer to each problem. Its metrics end in _greedy.
    greedy: bool = True
    # Prompt template: a text file with {question}, or the name of a packaged template. null: the prompt that the recipe
    # uses in training.
    template: str | None = None
    best: Best | None = None  # keep and export the best checkpoints; null: only the newest checkpoints are kept
    early_stop: EarlyStop | None = None  # end the run when a metric no longer improves; null: never

    def conflicts(self) -> Iterator[str]:
        """Yields error messages about the sets and their numbers of samples, and about `best` or `early_stop` in a run
        without evaluations during training. Call it only for a whole config: a part may have `best` without `sets`."""
        yield from sets_problems("evaluation.sets", self.sets, n=self.n, k=self.k, temperature=self.temperature)
        followed = {"best": self.best, "early_stop": self.early_stop}
        for name in (name for name, setting in followed.items() if setting is not None):
            if not self.sets:
                yield f"evaluation.{name} without evaluation.sets: no evaluation takes place; set evaluation.sets"
            elif not self.every:
                yield f"evaluation.{name} with evaluation.every = 0: give the iterations between evaluations"


def sets_of(sets: Sets) -> list[EvaluationSet]:
    """Returns the sets of a setting `sets` as a list of EvaluationSet. A string in `sets` names a benchmark."""
    return [EvaluationSet(name=entry) if isinstance(entry, str) else entry for entry in sets]


def sets_problems(setting: str, sets: Sets, *, n: int, k: Sequence[int], temperature: float) -> Iterator[str]:
    """Yields error messages about sets with the same name, about a k of pass@k above the number of samples, and about
    several samples at temperature 0. `setting`: name of the setting that contains the sets, for the messages. `n`, `k`,
    `temperature`: values for sets in which these settings are null."""
    entries = sets_of(sets)
    names = [entry.title for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"{setting}: {', '.join(twice)} is there twice: give the sets different names"
    for entry in entries:
        samples, ks = entry.n or n, entry.k or k
        if too_large := [count for count in ks if count > samples]:
            yield (
                f"{setting}: {entry.title}: k = {[*ks]} with n = {samples}: pass@{too_large[0]} needs as many samples; "
                "raise n"
            )
        if samples > 1 and (temperature if entry.temperature is None else entry.temperature) == 0:
            yield f"{setting}: {entry.title}: n = {samples} with temperature = 0 draws equal samples; raise temperature"


@config
class JudgingConfig:
    """A verifier model that scores the generator's samples, for best-of-n and weighted majority votes."""

    model: Model  # the verifier model
    template: str = "tango_verifier"  # name or file of the verifier's prompt template
    chat: bool = False  # send the prompt as a user message in the verifier's chat template
    votes: PositiveInt = 1  # number of verifications of each sample
    # The template asks whether a solution is correct. These are the two possible answers, the positive answer first,
    # such as [Yes, No]. A sample's weight is P(yes) / (P(yes) + P(no)), in which P(yes) and P(no) are the verifier's
    # probabilities of the two answers directly after the prompt. null: the weight is the fraction of the sample's
    # `votes` verifications that judge the sample correct.
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

    # The model to measure. This model answers the problems of a set. In sets of solutions (processbench_*), this model
    # is the verifier that judges the solutions. In the measure handoff, this model writes the first turn.
    model: Model
    families: tuple[str, ...] = ()  # your own model families, as package.module:FAMILY (docs/how_to/adding_a_model.md)
    # The problem sets: names of benchmarks, or mappings such as {name: mine, path: my.jsonl, n: 4, k: [1, 4]}.
    # docs/how_to/evaluation.md has all keys.
    sets: Sets = ()
    # Directory with local files of the sets: a directory of your own, or DIR/datasets after the command
    # `megatron-rl fetch --to DIR`. null: sets that are not local files are loaded from the Hugging Face hub.
    data_dir: str | None = None
    limit: PositiveInt | None = None  # maximum number of problems of each set; null: all problems
    # Prompt template: a text file with {question}, or the name of a packaged template. null: the template of the
    # benchmark; for sets of your own, tango_generator, or tango_verifier if the set has solutions to judge.
    template: str | None = None
    # Send the prompt as a user message in the tokenizer's chat template. Conversations always use the chat template.
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
    # legibility: the junior's cross-entropy on the answers of `solve`. drift: the KL divergences between each two of
    # `model`, `junior` and `base` on the answers of `solve`.
    measures: tuple[Literal["solve", "handoff", "legibility", "drift"], ...] = ("solve",)
    junior: Model | None = None  # the second model of the measures handoff, legibility and drift
    # Measure handoff: maximum number of rounds of one answer; in a round, each of the two models writes one turn
    max_rounds: PositiveInt = 150
    verifier: JudgingConfig | None = None  # a verifier model that scores the samples; null: no verifier
    base: Model | None = None  # the model before training, for the measure drift
    # The reward function that grades answers to the problems of sets of your own. Its settings `workers`, timeouts and
    # memory limit are used for the graders of the benchmarks as well.
    reward: Reward = field(default_factory=Reward)
    # The engine that generates the answers.
    engine: Engine = field(default_factory=Embedded)
    launch: Launch = field(default_factory=Launch)  # number of ranks to start

    def problems(self) -> Iterator[str]:
        """Yields error messages about settings of the evaluation that contradict each other or are incomplete."""
        if not self.sets:
            yield "sets = []: name benchmarks (gsm8k, amc23, ...), or give a set of your own as {path: my.jsonl}"
        yield from sets_problems("sets", self.sets, n=self.n, k=self.k, temperature=1.0)  # n greedy samples are allowed
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
