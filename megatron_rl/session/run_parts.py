"""Opens the parts of a training run that exist before its engines: tokenizers, data, policies, progress."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.base import ConfigError, refusing
from megatron_rl.data.mixed_sources import MixedReader
from megatron_rl.data.problems import PromptReader
from megatron_rl.megatron.policy import MegatronPolicy
from megatron_rl.messages.world import World
from megatron_rl.run.checkpoint import STATE
from megatron_rl.run.json_lines import UNREADABLE
from megatron_rl.run.run_directory import Interrupts
from megatron_rl.session import builders
from megatron_rl.session.run_setup import Driver
from megatron_rl.spec.run_spec import RunSpec
from megatron_rl.texts.chat_template import tokenizer_of
from megatron_rl.training.progress import Progress
from megatron_rl.training.prompts import check_juniors, overlaps
from megatron_rl.types import Prompt
from megatron_rl.weights.dist_checkpoint import refuse_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a training run that are opened before the engines, and the progress from which the run continues."""

    spec: RunSpec
    world: World
    driver: Driver
    interrupts: Interrupts
    tokenizers: Mapping[str, Any]
    readers: Mapping[str, PromptReader | MixedReader]  # prompt readers by role; roles may share a reader
    held_out: Mapping[str, list[Prompt]]  # {name of an evaluation set: prompts}
    policies: Mapping[str, MegatronPolicy]  # those of this rank
    ranks: Mapping[str, range]  # {role: its ranks}
    progress: Progress
    recipe_states: list[dict[str, Any]]  # the recipe's states in the checkpoint (CreditStage.states); [] in a new run

    @functools.cached_property
    def _worlds(self) -> dict[str, World]:
        return {name: World(policy.groups.control) for name, policy in self.policies.items()}

    def world_of(self, policy: str) -> World:
        """Returns the ranks of a policy of this rank."""
        return self._worlds[policy]


def open_parts(spec: RunSpec, world: World, driver: Driver, interrupts: Interrupts) -> RunParts:
    """Loads the tokenizers, data sets and policies, and restores the newest checkpoint if there is one. Collective."""
    driver.say(f"reading tokenizers and data: {', '.join(one.path for one in spec.data.training.values())}")
    tokenizers = {n: tokenizer_of(role.model) for n, role in spec.roles.items()}
    check_juniors(spec.roles, tokenizers)
    limits = spec.prompt_limits(next(iter(spec.recipe.roles())))
    readers, held_out, rows = builders.prompts(
        spec.recipe, spec.data, spec.roles, tokenizers, limits, seed=spec.run.seed
    )
    texts = (text for reader in dict.fromkeys(readers.values()) for text in reader.questions)
    held = {name: [prompt.payload for prompt in own] for name, own in held_out.items()}
    for line in overlaps(texts, held, spec.loop.evaluation):
        driver.say(line)
    world.from_leader(driver.compare, spec.models, rows)
    driver.say(f"reading models: {', '.join(n for n, role in spec.roles.items() if role.has_policy)}")
    driver.checkpoints.reference_every = tuple(spec.reference_resets.values())
    ranks = spec.role_ranks
    policies = builders.policies(spec.roles, spec.trained_policies, spec.run, ranks=ranks)
    progress, recipe_states = Progress(), list[dict[str, Any]]()
    if driver.resumed is not None:
        place = driver.resumed.path / STATE
        for name in spec.trained_policies:
            if name in policies:
                _restore(policies[name], name, driver, spec.reference_resets.get(name))
        cure = "remove this checkpoint to go on from an earlier one, or give another run.name"
        with refusing(lambda error: f"{place} is not the state of this run ({error!r}): {cure}", *UNREADABLE):
            state = driver.resumed.read_state()
            recipe_states = state["recipe"]
            for name, reader in readers.items():
                reader.load_state_dict(state["data"][name])
            progress = Progress(**state["progress"])
        driver.checkpoints.protected = frozenset(number for number, _ in progress.best)
    return RunParts(
        spec=spec, world=world, driver=driver, interrupts=interrupts, tokenizers=tokenizers, readers=readers,
        held_out=held_out, policies=policies, ranks=ranks, progress=progress, recipe_states=recipe_states,
    )  # fmt: skip


def _restore(policy: MegatronPolicy, name: str, driver: Driver, reset_every: int | None) -> None:
    """Restores a policy from the checkpoint from which the run resumes. If the policy's reference model was replaced
    during the run, restores the reference model from the checkpoint of its last replacement. `reset_every`: iterations
    between two replacements; None if the reference model is never replaced. Collective."""
    assert driver.resumed is not None, "the run resumes"
    paths, number = [driver.resumed.path / name], driver.resumed.number
    if reset_every is not None and (last := number - number % reset_every) not in (0, number):
        paths.insert(0, driver.checkpoints.path(last) / name)
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"{path} is missing, from which the reference of {name} is read: set roles.{name}.loss."
                "reset_reference_every to its value when the run was stopped"
            )
        World(policy.groups.control).from_leader(refuse_code, path)
        policy.state.load(path)
        if path != paths[-1]:
            policy.keep_reference()
