"""Samples, annotates and grades solutions for recipes, as they come; measures them, and checks recipes' arguments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, TypeVar

from megatron_rl.algorithms.estimators import UNGROUPED, find_estimator, word_of
from megatron_rl.chat_template import ChatTokenizer, problem_text, tokenize, tokenizer_of
from megatron_rl.config.data_settings import resolve
from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.protocol import Sampling
from megatron_rl.rewards.grading_pool import Graded, check_failures
from megatron_rl.rewards.tags import generator_format, step_spans, step_texts
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.text import Decoded, decode, read_template
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.training.rollouts import Draws, check_senior_share, greedy, plain
from megatron_rl.types import STEP, Annotations, Outcome, Prompt, Rollout

GENERATOR, VERIFIER = "generator", "verifier"  # roles of the recipes of this folder
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """One graded answer to a problem."""

    rollout: Rollout  # its reasoning steps are annotated; it has the reward `outcome`, and `correct` in the payload
    text: str
    correct: bool

    @property
    def steps(self) -> list[str]:
        """The text of each reasoning step."""
        return step_texts(self.text)

    @property
    def form(self) -> float:
        """The format score, on which it depends whether a verification must have one verdict for each step."""
        return generator_format(self.text)

    def to_train(self, credited: Rollout) -> list[Rollout]:
        """Returns the samples to train on, of its rollout with advantages."""
        return [credited]


Then = Callable[[int, Solution], object]  # takes a solution and its place among those that were asked for


def pass_over(place: int, solution: Solution) -> None:
    """Takes a solution and does nothing."""


def solve(
    context: RolloutContext,
    role: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    then: Then = pass_over,
) -> tuple[list[Solution], dict[str, float]]:
    """Samples [P * n] solutions and grades them while others are written. -> the graded ones in order, and metrics:
    graded/timeout, graded/error, steps_per_solution.

    A sample whose grading gave no score is no solution: it leaves its group. `then` gets each solution, and its place
    among the [P * n], when it is graded. Raises RewardFailure when too many gradings fail; EngineError for a tandem
    whose author mask is missing or cannot be true.
    """
    start, draws = time.perf_counter(), Draws(context, role, sampling)
    for i, prompt in enumerate(prompts):
        draws.ask(i, prompt)
    found: dict[int, tuple[Rollout, str, Graded]] = {}
    solutions: dict[int, Solution] = {}

    def grade(batch: Sequence[tuple[int, list[Rollout]]]) -> None:
        places = [i * sampling.n + j for i, group in batch for j in range(len(group))]
        read = [_read(rollout, context.tokenizers[role]) for _, group in batch for rollout in group]
        graded = context.grade([text for _, text in read], [rollout.payload for rollout, _ in read])
        for place, (rollout, text), result in zip(places, read, graded, strict=True):
            found[place] = rollout, text, result
            if result.outcome is Outcome.SCORE:
                solutions[place] = _solution(rollout, text, result)
                then(place, solutions[place])
        context.watch.beat()

    answered = _beside(draws.answers(), grade)
    context.watch.add("rollout", answered - start)
    context.watch.add("reward", time.perf_counter() - answered)  # what grading took longer than sampling
    gradings = [found[place][2] for place in sorted(found)]
    check_failures(gradings, context.max_failure_share)
    rollouts = [rollout for rollout, _, _ in found.values()]
    check_senior_share(rollouts, sampling.tandem)
    metrics = {f"graded/{kind.value}": _count(gradings, kind) for kind in (Outcome.TIMEOUT, Outcome.ERROR)}
    metrics["steps_per_solution"] = fmean(float(len(r.annotations_of(STEP))) for r in rollouts) if rollouts else 0.0
    return [solutions[place] for place in sorted(solutions)], metrics


def sampling_for(context: RolloutContext, iteration: Iteration, role: str, n: int) -> Sampling:
    """Returns how a role draws n samples in an iteration, with a seed of its own. Log-probs are asked for of a role
    that the iteration trains."""
    seed = context.seed_for(iteration.number, role)
    return replace(context.samplings[role], n=n, seed=seed, logprobs=role in iteration.roles)


def accuracies(
    context: RolloutContext, role: str, prompts: Sequence[Prompt]
) -> tuple[dict[str, float], list[Solution]]:
    """Measures one draw per problem at temperature 1, and greedy decoding: accuracy (the share that is correct), reward
    (the mean of the grader's scores) and ungraded (answers without a score, which are not correct and have the reward
    0). -> ({metric: value}, the sampled solutions)."""
    own, seed = context.samplings[role], context.seed
    sampled, _ = solve(context, role, prompts, plain(own, seed=seed))
    likeliest, _ = solve(context, role, prompts, greedy(own, seed=seed))
    metrics: dict[str, float] = {}
    for name, solutions in (("sampled", sampled), ("greedy", likeliest)):
        metrics[f"{role}/accuracy_{name}"] = sum(s.correct for s in solutions) / len(prompts)
        metrics[f"{role}/reward_{name}"] = sum(s.rollout.rewards["outcome"] for s in solutions) / len(prompts)
        if ungraded := len(prompts) - len(solutions):
            metrics[f"{role}/ungraded_{name}"] = float(ungraded)
    return metrics | {f"{role}/num_problems": float(len(prompts))}, sampled


def accuracies_of_fitting(
    context: RolloutContext, role: str, prompts: Sequence[Prompt], own: Sequence[Prompt | None]
) -> dict[str, float]:
    """Measures a role as `accuracies` does on the problems that are not too long for it; `too_long` counts the others.

    `own`: each problem as the role reads it; None for one that is too long.
    """
    fitting = [replace(p, tokens=o.tokens) for p, o in zip(prompts, own, strict=True) if o is not None]
    metrics = accuracies(context, role, fitting)[0] if fitting else {}
    too_long = len(prompts) - len(fitting)
    return metrics | ({f"{role}/too_long": float(too_long)} if too_long else {})


def annotate_steps(rollout: Rollout, decoded: Decoded) -> Rollout:
    """Annotates the step blocks in what models wrote, by the tokens' own places in its text."""
    ranges = rollout.positions(decoded.tokens_of(step_spans(decoded.raw)))
    return replace(rollout, annotations={**rollout.annotations, STEP: Annotations(ranges)})


def question_text(template: str, payload: Mapping[str, object]) -> str:
    """Fills a template, a packaged name or a path, with the question of a problem. A problem with messages is put as
    that conversation, in which the question is the last user's message, and without the template."""
    asked = {name: payload[name] for name in ("question", "messages") if name in payload}
    return problem_text(read_template(template), asked)


MOST = 10**6  # of updates, group sizes and the like: a schedule is a list with a row for each update


def check_arguments(
    recipe: Any, *, groups: Sequence[str] = (), positive: Sequence[str] = (), natural: Sequence[str] = (),
    shares: Sequence[str] = (), templates: Mapping[str, Sequence[str]] | None = None, one_of: Sequence[str] = (),
) -> None:  # fmt: skip
    """Raises ConfigError for the first argument of a recipe, of those named, that cannot be: group sizes that are too
    small for recipe.estimator, numbers below 1 (positive) or 0 (natural), numbers above MOST, shares outside [0, 1],
    templates that are not there or lack a name that they need, which stands in braces (templates: argument -> names),
    and switches of which none is on (one_of). Conversations are put without a template, but one that is given must do
    for a text."""
    compares = "estimator" in {each.name for each in fields(recipe)}  # distillation has no rewards
    if compares:
        find_estimator(recipe.estimator)
    smallest = 2 if compares and word_of(recipe.estimator) not in UNGROUPED else 1
    for names, floor in ((groups, smallest), (positive, 1), (natural, 0)):
        for name in names:
            if not floor <= getattr(recipe, name) <= MOST:
                asked = f"recipe.args.{name} = {getattr(recipe, name)}"
                raise ConfigError(f"{asked}: give at least {floor}, and at most {MOST}")
    for name in shares:
        if not 0.0 <= getattr(recipe, name) <= 1.0:
            raise ConfigError(f"recipe.args.{name} = {getattr(recipe, name)}: it is a share, from 0 to 1")
    if one_of and not any(getattr(recipe, name) for name in one_of):
        raise ConfigError(
            f"recipe.args: {' and '.join(one_of)} are {'both' if len(one_of) == 2 else 'all'} false; set one to true"
        )
    for name, needed in (templates or {}).items():
        _check_template(name, getattr(recipe, name), needed)


def check_fields(spec: RunSpec, role: str, fields: Mapping[str, str], *, held_out: bool) -> None:
    """Raises ConfigError where the problems of the iterations that begin with `role` lack a field, and with `held_out`
    where those of evaluations do. `fields`: {name of the field: what reads it}."""
    own = f"roles.{role}.data" if f"roles.{role}.data" in spec.data.training else "data"
    sets = {own: spec.data.training[own]}
    if held_out and spec.data.held_out is not None:
        sets["evaluation.prompts"] = spec.data.held_out
    for place, source in sets.items():
        known = resolve(source).fields
        for name, reader in fields.items():
            if name not in known:
                raise ConfigError(
                    f"{place}.fields.{name} is not set, and {reader} reads the field {name!r} of every problem: set it "
                    "to the name of the column"
                )


def check_length(spec: RunSpec, role: str, name: str, text: str) -> None:
    """Raises ConfigError for a prompt of recipe.args.NAME that is longer than a role takes, where its tokenizer is on
    this machine. One from the hub is not fetched: such a prompt is found when it is asked."""
    own = spec.roles[role]
    if not Path(own.model.tokenizer or own.model.path).is_dir():
        return
    tokenizer = tokenizer_of(own.model)
    length = len(tokenize(ChatTokenizer(tokenizer) if own.chat else tokenizer, text))
    if length > own.max_prompt_tokens:
        raise ConfigError(
            f"roles.{role}.max_prompt_tokens = {own.max_prompt_tokens}: recipe.args.{name} has {length} tokens; raise "
            "the one, or shorten the other"
        )


def _check_template(name: str, template: str, needed: Sequence[str]) -> None:
    try:
        text = read_template(template)
    except FileNotFoundError as error:
        raise ConfigError(f"recipe.args.{name}: {error}") from None
    missing = [word for each in needed if (word := "{" + each + "}") not in text]
    if missing:
        raise ConfigError(
            f"recipe.args.{name} = {template!r}: the text has no {' and no '.join(missing)}; write the name, with its "
            "braces, where that is to stand in the prompt"
        )


def _read(rollout: Rollout, tokenizer: Any) -> tuple[Rollout, str]:
    """Decodes what was written. -> (rollout with its steps annotated, text)."""
    decoded = decode(tokenizer, rollout.response)
    return annotate_steps(rollout, decoded), decoded.text


def _solution(rollout: Rollout, text: str, graded: Graded) -> Solution:
    payload = {**rollout.payload, "correct": graded.correct, "grading": Outcome.SCORE.value}
    rewards = {**rollout.rewards, **graded.metrics, "outcome": graded.score}
    return Solution(rollout=replace(rollout, payload=payload, rewards=rewards), text=text, correct=graded.correct)


def _count(gradings: Sequence[Graded], kind: Outcome) -> float:
    return float(sum(graded.outcome is kind for graded in gradings))


def _beside(items: Iterable[Item], work: Callable[[Sequence[Item]], None]) -> float:
    """Reads all items while a second thread works on those that are there; `work` gets all that came since its last
    call. -> the time (perf_counter) at which the last item came. Raises what either raises."""
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
