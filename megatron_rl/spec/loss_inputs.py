"""Compares the inputs that a loss needs with what the recipe, or the rows of data, give the loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.algorithms.centering import ENGINE_CANDIDATES
from megatron_rl.algorithms.objectives import WORDS, Objective, find
from megatron_rl.algorithms.value_loss import loss_of
from megatron_rl.batches.packed_batch import CANDIDATES, inputs_of_rollouts
from megatron_rl.config.engines import Rollouts, Servers
from megatron_rl.config.model import RoleConfig
from megatron_rl.spec.run_spec import RoleSpec

# {input of a loss: what gives it}, for error messages
GIVERS = {
    "pairs": "the recipe megatron_rl.recipes.online_dpo:OnlineDpo, or `megatron-rl sft`",
    "teacher_logprobs": "the recipe megatron_rl.recipes.distil:Distil",
    "teacher_candidate_logprobs": "the recipe megatron_rl.recipes.distil:Distil with recipe.args.top_k of at least 1",
    **dict.fromkeys(("targets", "rewards", "labels", "kl", "margin", "step_label"), "`megatron-rl sft`"),
    "demonstrations": "a recipe of your own that adds solutions of another author to its groups",
}
# what the rows of each format give (data/sft.py)
ROWS = ({"targets", "rewards", "labels", "kl"}, {"pairs", "margin"}, {"step_label"})


def loss_input_problems(recipe: Any, roles: Mapping[str, RoleSpec], target: str) -> Iterator[str]:
    """Yields an error message for each trained role whose loss needs other inputs than the recipe gives, or does not
    read everything that the recipe gives (RecipeRole.gives).

    The rollouts of a critic that shares a policy's model are added to the rollouts of the policy.
    """
    parts = {name: part for name, part in recipe.roles().items() if part.trained}
    shared: dict[str, frozenset[str]] = {}  # {policy: what its critics give}
    for name in [name for name in parts if roles[name].shares_as_critic]:
        owner = roles[name].owner
        shared[owner] = shared.get(owner, frozenset()) | parts.pop(name).gives
    for name, part in parts.items():
        owner = roles[roles[name].owner]
        drawn = {CANDIDATES, ENGINE_CANDIDATES} if owner.loss.centering else set()
        needs, gives = loss_of(owner).needs, part.gives | shared.get(owner.name, frozenset()) | drawn
        if not _fits(needs, gives):
            yield f"roles.{name}.{_problem(recipe, target, owner, needs, gives)}"


def centering_problems(
    recipe: Any, roles: Mapping[str, RoleSpec], engine: Any, rollouts: Rollouts, *, replayed: bool
) -> Iterator[str]:
    """Yields an error message for each trained role whose gradient cannot be centered, because of how its rollouts are
    made. `engine`: the section of the config. `replayed`: the run trains on stored rollouts."""
    for name, part in recipe.roles().items():
        role = roles[name]
        if not part.trained or role.head is not None or not (k := roles[role.owner].loss.centering):
            continue
        place = f"roles.{role.owner}.loss.centering = {k} with"
        if role.sampling.temperature == 0:
            yield f"{place} roles.{name}.sampling.temperature = 0: the engine then draws no token; set it above 0"
        if rollouts.mixed == "rescore":
            yield (
                f"{place} rollouts.mixed = 'rescore': the engine's log-probs of the sampled tokens are replaced, those "
                "of the other tokens cannot be; choose another value, each token has its own distribution anyway"
            )
        if replayed:
            yield f"{place} debug.replay: stored rollouts may lack the engine's likeliest tokens; set centering to 0"
        if isinstance(engine, Servers) and not engine.tells_top:
            yield (
                f"{place} engine.kind = {engine.kind!r}: its servers do not return the most likely tokens of each "
                "position; set centering to 0, or engine.kind to vllm, sglang or embedded"
            )
        cut = role.sampling.top_p < 1 or role.sampling.min_p > 0 or role.sampling.top_k > 0
        if isinstance(engine, Servers) and engine.top_before_cuts and cut:
            yield (
                f"{place} roles.{name}.sampling.top_p, top_k or min_p and engine.kind = {engine.kind!r}: its servers "
                "return the most likely tokens before tokens are removed; leave truncation off, or set centering to 0"
            )


def row_problems(role: RoleConfig, needs: frozenset[str]) -> Iterator[str]:
    """Yields an error message if no format of data rows gives a loss of `megatron-rl sft` all inputs that it needs."""
    inputs = inputs_of_rollouts(needs)
    if not any(inputs <= row for row in ROWS):
        fitting = [word for word in WORDS if any(inputs_of_rollouts(find(word, {}).needs) <= row for row in ROWS)]
        yield (
            f"loss.objective = {role.loss.objective!r} needs {_listed(inputs)}, which rows of data do not have: take "
            f"{_listed(fitting, 'or')} (in an objective of your own, `needs` lists what it reads: targets, rewards, "
            "labels, pairs or step_label)"
        )


def _fits(needs: frozenset[str], gives: frozenset[str]) -> bool:
    """Returns whether rollouts that give `gives` have all inputs of a loss, and the loss reads all that they give. A
    loss that reads a teacher's log-probs of candidates need not read those of the sampled tokens."""
    inputs = inputs_of_rollouts(needs)
    optional = {"teacher_logprobs", CANDIDATES} if "teacher_candidate_logprobs" in inputs else set()
    return inputs <= gives <= inputs | optional


def _problem(recipe: Any, target: str, role: RoleConfig, needs: frozenset[str], gives: frozenset[str]) -> str:
    """Returns the error message about a role whose loss does not fit, without the role's name. The message says which
    objectives fit, and what gives the inputs that are missing."""
    name, inputs = role.loss.objective, inputs_of_rollouts(needs)
    place = f"loss.objective = {name!r}" if role.head is None else f"head = {role.head!r}"
    more = f" with loss.value_coef = {role.loss.value_coef:g}" if role.head is None and role.loss.value_coef else ""
    cures = []
    if role.head is None:
        beside = needs - find(name, role.loss.objective_args).needs  # what the role's loss reads besides its objective
        fitting = [word for word, objective in _objectives(recipe).items() if _fits(objective.needs | beside, gives)]
        cures += [f"take {_listed(fitting, 'or')}"] * bool(fitting)
    cures += [f"{word} can be had from {GIVERS[word]}" for word in sorted(inputs - gives) if word in GIVERS]
    if ":" in name or not target.startswith("megatron_rl."):
        cures.append("declare what your objective reads in `needs`, and what your recipe returns in RecipeRole.gives")
    return f"{place}{more} needs {_listed(inputs)}, and recipe {target} gives {_listed(gives)}: {'; '.join(cures)}"


def _objectives(recipe: Any) -> dict[str, Objective]:
    """Returns the objectives that a config can name: the packaged ones, and those in the file of the recipe."""
    module = type(recipe).__module__
    members = vars(sys.modules[module]).items()
    beside = {f"{module}:{name}": member for name, member in members if isinstance(member, Objective)}
    return {word: find(word, {}) for word in WORDS} | beside


def _listed(names: frozenset[str] | list[str], last: str = "and") -> str:
    """Returns names as words of a sentence, such as "a, b and c"; sets are sorted."""
    *first, end = sorted(names) if isinstance(names, frozenset) else names or ["nothing"]
    return f"{', '.join(first)} {last} {end}" if first else end
