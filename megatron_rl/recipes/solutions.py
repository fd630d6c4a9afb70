"""Functions that recipes share: sampling, annotating and grading solutions while further solutions are generated,
and checking a recipe's arguments.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, TypeVar

from megatron_rl.algorithms.estimators import GAE, UNGROUPED, find_estimator, word_of
from megatron_rl.config.base import refuse, refusing
from megatron_rl.config.data_settings import resolve
from megatron_rl.config.schema import HELD_OUT, ConfigError
from megatron_rl.data.conversations import ANSWER, MESSAGES, QUESTION
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.replacement import ROUNDS, to_replace
from megatron_rl.recipes.votes import VotedLabels
from megatron_rl.rewards.grading_pool import Graded, check_failures
from megatron_rl.run.metrics import REPLACED
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.chat_template import ChatTokenizer, problem_text, tokenize, tokenizer_of
from megatron_rl.texts.response_forms import response_text
from megatron_rl.texts.tags import generator_format, step_spans, step_texts
from megatron_rl.texts.text import Decoded, decode, read_template
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.training.rollouts import Draws, check_senior_share
from megatron_rl.types import STEP, TEMPLATE, Annotations, Outcome, Prompt, Rollout

GENERATOR, VERIFIER = "generator", "verifier"  # role names of the recipes in this package
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """One graded answer to a problem."""

    # with annotated steps, the reward `outcome`, and `correct` in its payload (None if a majority vote gave the label)
    rollout: Rollout
    text: str
    correct: bool  # also False if it is unknown; see Recipe.needs_correct

    @property
    def steps(self) -> list[str]:
        return step_texts(self.text)

    @property
    def form(self) -> float:
        """The format score of the solution's text. It determines whether a verification of the solution must have one
        verdict per step.
        """
        return generator_format(self.text)

    def to_train(self, verified: Rollout) -> list[Rollout]:
        """Returns the rollouts to train on. `verified` is the solution's rollout with the results of its
        verification.
        """
        return [verified]


# callback for a graded solution: (index among the requested samples, solution)
Then = Callable[[int, Solution], object]


def pass_over(place: int, solution: Solution) -> None:
    """Does nothing. The default callback for graded solutions."""


def solve(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over, *, voted:
    bool | None = None,
) -> tuple[list[Solution], dict[str, float]]:  # fmt: skip
    """Samples n solutions of each of [P] prompts, and grades each solution while other solutions are still being
    generated. Returns the graded solutions in order, and metrics: graded/timeout and graded/error (number of samples
    without a score), steps_per_solution, and, unless they are 0, graded/repeated (number of gradings that failed once)
    and replaced/timeout and replaced/error (number of samples that were replaced because their gradings failed).

    A sample whose grading failed for a reason that the response did not cause is replaced by a new sample of the same
    prompt, up to ROUNDS times, unless decoding is greedy; see `to_replace`. A sample that still has no score is not a
    solution and is left out of its group. As soon as a solution is graded, `then` is called with its index (among the P
    * n samples) and the solution.

    `voted`: whether responses are graded against the most frequent answer to their prompt instead of the known answer.
        None: the setting rollouts.labels decides. If True, the most frequent answer also replaces the answer in the
        payload, whose `correct` is None, and the metrics of `VotedLabels` are added.

    Raises RewardFailure if too many gradings of the first P * n samples fail. With Tandem sampling, raises EngineError
    if the engine's record of which model generated each token is missing or implausible.
    """
    n, labels = sampling.n, VotedLabels(sampling.n) if (context.voted if voted is None else voted) else None
    samples = _Samples(context=context, role=role, prompts=prompts, group_size=n, then=then, labels=labels)
    samples.draw(sampling, {i: i * n for i in range(len(prompts))})
    check_failures(samples.gradings, context.max_failure_share)
    replaced: Counter[str] = Counter()
    for number in range(ROUNDS if sampling.temperature else 0):
        failed = [place for place, (_, result) in samples.graded.items() if result.failed]
        failed = to_replace(failed, count=len(prompts) * n, group_size=n)
        if not failed:
            break
        replaced.update(f"{REPLACED}{samples.graded[place][1].outcome.value}" for place in failed)
        again = replace(sampling, n=1, seed=context.seed_for(sampling.seed, "replaced", number))
        samples.draw(again, {place: place for place in failed})
    rollouts = [rollout for rollout, _ in samples.graded.values()]
    check_senior_share(rollouts, sampling.tandem)
    outcomes = [graded.outcome for graded in samples.gradings]
    metrics = {f"graded/{kind.value}": float(outcomes.count(kind)) for kind in (Outcome.TIMEOUT, Outcome.ERROR)}
    metrics |= {"graded/repeated": float(samples.repeated)} if samples.repeated else {}
    metrics |= {name: float(count) for name, count in replaced.items()}
    metrics["steps_per_solution"] = fmean(float(len(r.annotations_of(STEP))) for r in rollouts) if rollouts else 0.0
    metrics |= labels.metrics(context, prompts) if labels is not None and prompts else {}
    return [samples.solutions[place] for place in sorted(samples.solutions)], metrics


@dataclass(kw_only=True, eq=False)
class _Samples:
    """The P * n samples of one call of `solve`, by index."""

    context: RolloutContext
    role: str
    prompts: Sequence[Prompt]
    group_size: int
    then: Then
    labels: VotedLabels | None  # grades by majority vote; None: grade with the known answers
    graded: dict[int, tuple[Rollout, Graded]] = field(default_factory=dict)
    solutions: dict[int, Solution] = field(default_factory=dict)  # the samples with a score
    repeated: int = 0  # number of gradings that failed once

    @property
    def gradings(self) -> list[Graded]:
        return [self.graded[place][1] for place in sorted(self.graded)]

    def draw(self, sampling: Sampling, requests: Mapping[int, int]) -> None:
        """Samples and grades `sampling.n` responses for each request. `requests`: {key of a request: index of the first
        sample of the request}.
        """
        start, draws = time.perf_counter(), Draws(self.context, self.role, sampling)
        for key, place in requests.items():
            draws.ask(key, self.prompts[place // self.group_size], group=place // self.group_size)
        answered = _beside(((requests[key], drawn) for key, drawn in draws.answers()), self._grade)
        self.context.watch.add("rollout", answered - start)
        # logs the time that grading takes after sampling has finished
        self.context.watch.add("reward", time.perf_counter() - answered)

    def _grade(self, batch: Sequence[tuple[int, list[Rollout]]]) -> None:
        """Grades samples. `batch`: for each request, (index of the first sample, the samples from this index on)."""
        places = [first + j for first, group in batch for j in range(len(group))]
        drawn = [rollout for _, group in batch for rollout in group]
        tokenizer, payloads = self.context.tokenizers[self.role], [rollout.payload for rollout in drawn]
        decoded = [decode(tokenizer, rollout.response) for rollout in drawn]
        pairs = zip(drawn, decoded, strict=True)
        texts = [response_text(tokenizer, rollout.prompt, rollout.response, response) for rollout, response in pairs]
        if self.labels is None:
            graded = self.context.grade(texts, payloads)
        else:
            payloads, graded = self.labels.grade(self.context, places, texts, payloads)
        rows = zip(places, drawn, payloads, decoded, texts, graded, strict=True)
        for place, rollout, payload, response, text, result in rows:
            annotated = annotate_steps(rollout, response)
            self.graded[place] = annotated, result
            self.repeated += result.repeated
            if result.outcome is Outcome.SCORE:
                # agreement with the model's own majority vote is no accuracy
                correct = result.correct if self.labels is None else None
                payload = {**payload, "correct": correct, "grading": result.label}
                rewards = {**rollout.rewards, **result.metrics, "outcome": result.score}
                scored = replace(annotated, payload=payload, rewards=rewards)
                self.solutions[place] = Solution(rollout=scored, text=text, correct=bool(result.correct))
                self.then(place, self.solutions[place])
        self.context.watch.beat()


def sampling_for(context: RolloutContext, iteration: Iteration, role: str, n: int) -> Sampling:
    """Returns the settings for n samples of a role in an iteration, with a seed that depends on the iteration and the
    role. Log-probs are requested only for roles that the iteration trains.
    """
    seed = context.seed_for(iteration.number, role)
    return replace(context.samplings[role], n=n, seed=seed, logprobs=role in iteration.roles)


def annotate_steps(rollout: Rollout, decoded: Decoded) -> Rollout:
    """Annotates the reasoning steps of a rollout. A step is a tagged block in the generated text. The tokens of a step
    are those whose bytes in the text overlap the block.
    """
    ranges = rollout.positions(decoded.tokens_of(step_spans(decoded.raw)))
    return replace(rollout, annotations={**rollout.annotations, STEP: Annotations(ranges)})


def question_text(template: str, payload: Mapping[str, object]) -> str:
    """Fills a template (packaged name or path) with the fields of a problem, such as {question}, but not with its
    answer. If the problem's data set has a template of its own, that template is used. A problem with messages is
    returned as a conversation without the template; its question is the last user message.
    """
    text = read_template(str(payload.get(TEMPLATE, template)))
    named = {name for name in payload if name != ANSWER and f"{{{name}}}" in text} | {QUESTION, MESSAGES}
    return problem_text(text, {name: payload[name] for name in named if name in payload})


def check_arguments(
    recipe: Any, *, groups: Sequence[str] = (), templates: Mapping[str, Sequence[str]] | None = None,
    critics: bool = False,
) -> None:  # fmt: skip
    """Raises ConfigError for the first invalid argument of a recipe. The bounds of single numbers are in the types of
    the recipe's fields, such as Count and Share.

    `groups`: names of the arguments that are group sizes. These must be large enough for recipe.estimator.
    `templates`: {name of an argument: names of fields}. The value of the argument must be a template that exists and
        contains each field in braces. This is required even if the problems are conversations, which use no template.
    `critics`: whether the recipe supports the estimator `gae`, which compares no samples of a group.
    """
    # recipes without the argument `estimator`, such as distillation, do not compare rewards
    if "estimator" in {f.name for f in fields(recipe)} and not (critics and word_of(recipe.estimator) == GAE):
        find_estimator(recipe.estimator)
        if word_of(recipe.estimator) not in UNGROUPED and (alone := [n for n in groups if getattr(recipe, n) < 2]):
            raise ConfigError(
                f"recipe.args.{alone[0]} = {getattr(recipe, alone[0])}: give at least 2 for the samples of a group to "
                "be compared"
            )
    for name, needed in (templates or {}).items():
        with refusing(lambda error, name=name: f"recipe.args.{name}: {error}", FileNotFoundError):
            text = read_template(getattr(recipe, name))
        if missing := [word for name_of_field in needed if (word := "{" + name_of_field + "}") not in text]:
            raise ConfigError(
                f"recipe.args.{name} = {getattr(recipe, name)!r}: the text has no {' and no '.join(missing)}; write "
                "the name, with its braces, where that is to stand in the prompt"
            )


def check_fields(run: CheckedRun, role: str, fields: Mapping[str, str], *, held_out: bool) -> None:
    """Raises ConfigError if problems lack a field that the recipe needs. Checks the training problems of the iterations
    whose first role is `role`, and with `held_out` also the evaluation problems. `fields`: {name of the field:
    description of the setting that reads it}.
    """
    sets = dict(run.data.of(role))
    evaluated = run.data.held_out if held_out else ()
    sets |= {f"{HELD_OUT}.{dataset.name}": dataset.source for dataset in evaluated}
    refuse(
        *(
            f"{HELD_OUT}: the problems of {dataset.name} have no field {name!r}, and {reader} reads it: leave that set "
            "out"
            for dataset in evaluated
            if dataset.benchmark is not None
            for name, reader in fields.items()
        )
    )
    refuse(
        *(
            f"{place}.fields.{name} is not set, and {reader} reads the field {name!r} of every problem: set it to the "
            "name of the column, also if the column has this name"
            for place, source in sets.items()
            for name, reader in fields.items()
            if name not in resolve(source).fields
        )
    )


def check_length(run: CheckedRun, role: str, name: str, text: str) -> None:
    """Raises ConfigError if a prompt has more tokens than max_prompt_tokens of the role. `text`: the prompt. `name`:
    the argument of the recipe that defines the prompt. Checks only if the tokenizer is a local directory. With a hub
    name, a prompt that is too long is detected when it is used.
    """
    role_spec = run.roles[role]
    if not Path(role_spec.model.tokenizer or role_spec.model.path).is_dir():
        return
    tokenizer = tokenizer_of(role_spec.model)
    length = len(tokenize(ChatTokenizer(tokenizer) if role_spec.chat else tokenizer, text))
    if length > role_spec.max_prompt_tokens:
        raise ConfigError(
            f"roles.{role}.max_prompt_tokens = {role_spec.max_prompt_tokens}: recipe.args.{name} has {length} tokens; "
            "raise the one, or shorten the other"
        )


def _beside(items: Iterable[Item], work: Callable[[Sequence[Item]], None]) -> float:
    """Reads all items, and processes them with `work` in a second thread at the same time. Each call of `work` gets all
    items that arrived since its last call. Returns the time (perf_counter) after the last item was read. Raises any
    error that occurs while items are read, and any error of `work`.
    """
    waiting: SimpleQueue[Item] = SimpleQueue()

    def take() -> None:
        batch = [waiting.get() for _ in range(waiting.qsize())]
        if batch:
            work(batch)

    calls: deque[Future[None]] = deque()
    with ThreadPoolExecutor(max_workers=1) as worker:
        for item in items:
            waiting.put(item)
            calls.append(worker.submit(take))
            while calls and calls[0].done():
                calls.popleft().result()
        last = time.perf_counter()
        for call in calls:
            call.result()
    return last
