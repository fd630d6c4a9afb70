"""Tango over episodes of an environment: the verifier judges the generator's turns as reasoning steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.schema import ConfigError
from megatron_rl.control_tokens import ControlTokens
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.episode_rollouts import EpisodesGraded, OverEpisodes
from megatron_rl.recipes.solutions import GENERATOR, VERIFIER, Solution, Then, check_arguments, pass_over
from megatron_rl.recipes.tango import BaseTango
from megatron_rl.recipes.transcripts import Transcript, TranscriptForm, transcripts
from megatron_rl.training.iteration import RecipeRole, RolloutContext
from megatron_rl.types import Prompt


@dataclass(kw_only=True)
class TangoAgents(OverEpisodes, BaseTango):
    """A run of Tango whose solutions are conversations: a step is what the generator wrote between two texts of its
    environment, and verdict k is about turn k.

    An episode is correct where the sum of rewards that counts is above the middle of reward.range. One that failed or
    is late is neither correct nor wrong: it is not judged, and its group goes on without it.
    """

    role: str = GENERATOR  # the generator's, as the environment names it
    agents: int = 1  # of the generator in an episode; each is judged by itself
    verifier_template: str = "tango_turns_verifier"  # with {question}, {solution}, {num_steps}
    # How a conversation stands in place of {solution}: each turn of the generator, and what it was told before it.
    turn_form: str = "Turn {number}:\n{text}\n\n"
    told_form: str = "The environment said:\n{text}\n\n"

    def __post_init__(self) -> None:
        check_arguments(self, positive=["agents", "workers"])
        if self.role == VERIFIER:
            raise ConfigError(f"recipe.args.role = {self.role!r} is the verifier's: give the generator another")
        for name in ("turn_form", "told_form"):
            if "{text}" not in getattr(self, name):
                raise ConfigError(f"recipe.args.{name} = {getattr(self, name)!r}: it needs {{text}}")
        self.build_maker({self.role: self.agents}, [self.role], key="role")
        self._form = TranscriptForm(turn=self.turn_form, told=self.told_form)
        super().__post_init__()

    @property
    def solver(self) -> str:
        return self.role

    def roles(self) -> Mapping[str, RecipeRole]:
        """Every number of Tango's is one of an agent."""
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
        """The episodes of one problem have the same seed of the environment, which comes from the sampling's."""
        seeds = [context.seed_for("task", sampling.seed, i) for i in range(len(prompts))]
        played = self.play_episodes(context, prompts, seeds, {self.role: sampling}, each=sampling.n)
        found = self._transcripts(context, played)
        for place, transcript in enumerate(found):
            then(place, transcript)
        return found, played.metrics

    def measure(
        self, context: RolloutContext, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, float], Sequence[Solution]]:
        metrics, sampled = self.measure_episodes(context, prompts)
        return metrics, self._transcripts(context, sampled)

    def _transcripts(self, context: RolloutContext, played: EpisodesGraded) -> list[Transcript]:
        reader = ControlTokens(context.tokenizers[VERIFIER])
        return transcripts(played, self, context.tokenizers[self.role], self._form, reader, context.threshold)
