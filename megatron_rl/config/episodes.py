"""The estimate of a role's episodes that plans are made with."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_rl.config.base import ConfigError, config


@config
class EpisodeEstimate:
    """An estimate of how often a role answers in an episode, and of what happens between two answers. Only plans read
    it. The defaults are those of a role that answers once."""

    answers: PositiveInt = 1  # of an agent in one episode
    told: NonNegativeInt = 0  # mean tokens that its environment puts before each answer but the first
    tool_s: NonNegativeFloat = 0.0  # mean seconds that the environment, with its tools, takes for that
    calls_at_once: PositiveInt = 64  # calls of the environment that run at the same time, over all episodes
    # The role's max_prompt_tokens holds for all that stands before an answer. false: for the prompt alone.
    bounded: bool = False

    def __post_init__(self) -> None:
        unread = {"told": self.told, "tool_s": self.tool_s}
        for name, value in unread.items():
            if value and self.answers == 1:
                raise ConfigError(f"{name} = {value} with answers = 1: nothing follows the answer; give answers, too")
