"""Runs the credit stage on the driver: the recipe computes advantages from rewards and scores, iteration by iteration,
and the resulting rollouts are checked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.batches.packed_batch import ADVANTAGES, IN_ADVANTAGES, SIGNALS
from megatron_rl.training.iteration import Collected, CreditContext, Iteration, Recipe
from megatron_rl.training.rollouts import measure, sizes, without_signal
from megatron_rl.training.store import State
from megatron_rl.types import Rollout, Stop


class RolloutError(RuntimeError):
    """Raised if a recipe returns rollouts that cannot be trained on. The message names the rollout and the problem."""


class CreditStage:
    """The stage of a run that credits the iterations in order. To credit an iteration means that the recipe computes
    the advantages of its rollouts. Stores the recipe's states after the last `lag` + 1 credited iterations.

    `lag`: rollouts.max_staleness. The rollouts of an iteration are generated with the recipe's state after the credit
        of the iteration that is `lag` + 1 iterations earlier, regardless of which later iterations are already
        credited.
    `after_scores`: if True, iterations are credited by the training loop, after the score stage. Otherwise an iteration
        is credited as soon as its rollouts are generated. All iterations of a run are credited in the same way, so that
        they are credited in order even if only some iterations need scores.
    """

    def __init__(
        self, recipe: Recipe, *, lag: int = 0, after_scores: bool = False,
        recipe_at: Callable[[int], Recipe] | None = None,
    ) -> None:  # fmt: skip
        """`recipe_at`: function (number of an iteration) -> recipe that credits it; None: `recipe` credits all."""
        self.recipe, self._lag = recipe, lag
        self.after_scores, self._recipe_at = after_scores, recipe_at
        # {number of credited iterations: state of the recipe after them}, oldest first
        self._states = {0: as_json(recipe.state_dict())}

    @property
    def states(self) -> list[State]:
        """The recipe's states after each of the last `lag` + 1 credited iterations, oldest first."""
        return [*self._states.values()]

    def restore(self, states: Sequence[State], number: int) -> None:
        """Restores the recipe's states. `states`: the value of the property `states` after the credit of iteration
        `number` - 1."""
        self._states = dict(enumerate(states, start=number + 1 - len(states)))
        self.recipe.load_state_dict(states[-1])

    def state_for(self, number: int) -> State:
        """Returns the recipe's state with which the rollouts of iteration `number` are generated."""
        states = self._states  # read the attribute once, because another thread may replace it (in `apply`)
        return states[max(number - self._lag, min(states))]

    def apply(self, iteration: Iteration, collected: Collected) -> Collected:
        """Credits an iteration. Returns the iteration's rollouts with advantages, and the iteration's metrics, which
        include the metrics that the recipe added.

        Raises RolloutError if the rollouts cannot be trained on.
        """
        context = CreditContext(handed_over=collected.handed_over)
        if self._recipe_at is not None and (recipe := self._recipe_at(iteration.number)) is not self.recipe:
            recipe.load_state_dict(self.states[-1])
            self.recipe = recipe
        found = self.recipe.credit(iteration, collected.rollouts, context)
        parts = self.recipe.roles()
        gives = {role: part.gives for role, part in parts.items()}
        if problem := next(_problems(iteration, found, gives), None):
            raise RolloutError(f"iteration {iteration.number}{problem}")
        done = iteration.number + 1
        self._states = {**self._states, done: as_json(self.recipe.state_dict())}
        self._states = {number: state for number, state in self._states.items() if number >= done - self._lag}
        rollouts = {role: list(found[role]) for role in iteration.roles}
        # A role with a head generates nothing: rewards and lengths are metrics of the role that wrote the texts.
        heads = {role for role, part in parts.items() if part.head is not None}
        metrics = {role: sizes(own) if role in heads else measure(own) for role, own in rollouts.items()}
        for role in (role for role in rollouts if ADVANTAGES in parts[role].gives):
            metrics[role]["groups_without_signal"] = without_signal(rollouts[role])
        # a recipe may add metrics of roles that the iteration does not train
        for added in (collected.metrics, context.metrics):
            for role, own in added.items():
                metrics[role] = {**metrics.get(role, {}), **own}
        return Collected(rollouts=rollouts, metrics=metrics, handed_over=collected.handed_over, credited=True)


def with_values(name: str, rollouts: Sequence[Rollout], critics: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts of the policy `name` with the critic's predictions added to their `values`. `critics`: the
    critic's rollouts of the same texts. Raises RolloutError unless both lists have the same tokens in the same order.
    """
    if [r.tokens.tobytes() for r in rollouts] != [r.tokens.tobytes() for r in critics]:
        raise RolloutError(
            f"the {len(rollouts)} rollouts of policy {name} and the {len(critics)} rollouts of the critic that shares "
            "the policy's weights differ: return rollouts with the same tokens in the same order for both from the "
            "recipe's method `credit`, or set the critic's model.path instead of same_as"
        )
    return [replace(r, values={**r.values, **one.values}) for r, one in zip(rollouts, critics, strict=True)]


def as_json(state: State) -> State:
    """Returns a deep copy of the state, made by encoding it as JSON and decoding it. The copy equals what a checkpoint
    will restore, and later iterations do not change it.
    """
    return json.loads(json.dumps(state))


def _problems(
    iteration: Iteration, found: Mapping[str, Sequence[Rollout]], gives: Mapping[str, frozenset[str]]
) -> Iterator[str]:
    """Yields the reasons why the rollouts of an iteration cannot be trained on. Each reason is written so that it can
    be appended to "iteration NUMBER" in an error message. `gives`: RecipeRole.gives of each role.
    """
    if set(found) != set(iteration.roles):
        yield (
            f" trains {', '.join(iteration.roles)}, and the recipe returned rollouts of "
            f"{', '.join(found) or 'no role'}: return each role of the iteration, with an empty list where there are "
            "none"
        )
        return
    for role in iteration.roles:
        for place, rollout in enumerate(found[role]):
            if wrong := _fault(rollout, role, gives[role]):
                yield f", {role}: rollout {place} (group {rollout.group!r}) {wrong}"
        for group, size in Counter(r.group for r in found[role] if "pairs" in gives[role]).items():
            if size != 2:
                yield (
                    f", {role}: group {group!r} has {size} rollouts, and the recipe gives pairs: return the preferred "
                    "rollout and then the other one"
                )


def _fault(rollout: Rollout, role: str, given: frozenset[str]) -> str | None:
    """Returns the reason why a rollout cannot be trained on, as the end of a sentence, or None if it can be. Checks
    only conditions that the class Rollout does not check itself.
    """
    length = len(rollout.tokens)
    if rollout.stop is Stop.ABORTED:
        return "was cut off by its engine, and is no answer: a session gives completions that are written to their end"
    if rollout.role != role:
        return f"is of role {rollout.role!r}: make it for the role that it is returned for"
    if given & IN_ADVANTAGES and rollout.advantages is None:
        return "has no advantages: assign them in the recipe's method credit (algorithms.advantages.assign_advantages)"
    if absent := sorted(given - SIGNALS - rollout.values.keys()):
        return f"has no {', '.join(absent)} in its values, which RecipeRole.gives names: add them in credit"
    if given & IN_ADVANTAGES and not np.isfinite(np.asarray(rollout.advantages)).all():
        return "has advantages that are not finite: look at its rewards"
    if rollout.experts is not None and len(rollout.experts) != length - 1:
        return f"names the experts of {len(rollout.experts)} tokens; an engine tells those of all {length} but the last"
    for label, found in rollout.annotations.items():
        if len(found) and (found.ranges.min() < 0 or found.ranges.max() > length):
            return f"has annotations {label!r} outside its {length} tokens"
    return None
