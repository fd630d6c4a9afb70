"""Tango over episodes of an environment: the verifier judges the generator's turns as reasoning steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.batches import units
from megatron_rl.config.base import Count, refuse
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.episode_rollouts import OUTCOME, EpisodesGraded, OverEpisodes
from megatron_rl.recipes.solutions import GENERATOR, VERIFIER, Solution, Then, pass_over
from megatron_rl.recipes.tango import BaseTango
from megatron_rl.recipes.transcripts import Transcript, TranscriptForm, transcripts
from megatron_rl.texts.control_tokens import ControlTokens
from megatron_rl.training.iteration import RecipeRole, RolloutContext
from megatron_rl.types import Prompt, Rollout


@dataclass(kw_only=True)
class TangoAgents(OverEpisodes, BaseTango):
    """A Tango recipe whose solutions are conversations. A step is the text that the generator produced between two
    messages of the environment; verdict k is about turn k.

    An episode is correct if its weighted reward is above the middle of reward.range. An episode that failed or timed
    out is neither correct nor wrong. It is not judged and is left out of its group.
    """

    role: str = GENERATOR  # the generator's role name in the environment
    agents: Count = 1  # number of generator agents in an episode; each is judged separately
    verifier_template: str = "tango_turns_verifier"  # template with {question}, {solution}, {num_steps}
    # format of one turn of a conversation in {solution}; `told_form` is the format of the environment's text before it
    turn_form: str = "Turn {number}:\n{text}\n\n"
    told_form: str = "The environment said:\n{text}\n\n"

    def __post_init__(self) -> None:
        refuse(*self.problems())
        self.build_maker({self.role: self.agents}, [self.role], key="role")
        self._form = TranscriptForm(turn=self.turn_form, observation=self.told_form)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.role == VERIFIER:
            yield f"recipe.args.role = {self.role!r} is the verifier's: give the generator another"
        for name, form in (("turn_form", self.turn_form), ("told_form", self.told_form)):
            if "{text}" not in form:
                yield f"recipe.args.{name} = {form!r}: it needs {{text}}"

    @property
    def solver(self) -> str:
        return self.role

    def roles(self) -> Mapping[str, RecipeRole]:
        """Returns Tango's roles with all sample counts multiplied by the number of agents."""
        return {
            name: replace(
                part,
                samples=part.samples * self.agents,
                drawn={role: count * self.agents for role, count in part.drawn.items()},
                episode=self.estimates.get(name, part.episode),
            )
            for name, part in super().roles().items()
        }

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return self.episode_prompt(payload)

    def draw(
        self, context: RolloutContext, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Transcript], dict[str, float]]:
        """Plays `sampling.n` episodes per problem, and returns their transcripts and metrics. The episodes of one
        problem have the same environment seed, derived from the sampling seed.
        """
        seeds = [context.seed_for("task", sampling.seed, i) for i in range(len(prompts))]
        played = self.play_episodes(context, prompts, seeds, {self.role: sampling}, per_problem=sampling.n)
        transcripts_of_agents = self._transcripts(context, played)
        for place, transcript in enumerate(transcripts_of_agents):
            then(place, transcript)
        return transcripts_of_agents, played.metrics

    def measure(
        self, context: RolloutContext, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, float], Sequence[Solution]]:
        metrics, sampled = self.measure_episodes(context, prompts)
        return metrics, self._transcripts(context, sampled)

    def whole_solutions(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Returns one rollout per agent and episode. Its outcome is the weighted sum of the agent's rewards."""
        return [replace(rollout, rewards={OUTCOME: self.total(rollout)}) for rollout in units.join(rollouts)]

    def share_credit(self, credited: Sequence[Rollout], rollouts: Sequence[Rollout]) -> list[Rollout]:
        return units.share(credited, rollouts)

    def _transcripts(self, context: RolloutContext, played: EpisodesGraded) -> list[Transcript]:
        reader = ControlTokens(context.tokenizers[VERIFIER])
        return transcripts(played, self, context.tokenizers[self.role], self._form, reader, context.threshold)
