"""The estimated lengths and tool times of a role's episodes, from which `megatron-rl plan` computes time and memory."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_rl.config.base import config


@config
class EpisodeEstimate:
    """An estimate of how many answers a role writes in one episode, and of the time and tokens between two answers.

    Only `megatron-rl plan` uses this estimate. The defaults describe a role that answers once.
    """

    answers: PositiveInt = 1  # number of answers of an agent in one episode
    told: NonNegativeInt = 0  # mean number of tokens that the environment inserts before each answer but the first
    tool_s: NonNegativeFloat = 0.0  # mean time in seconds that the environment and its tools take between two answers
    calls_at_once: PositiveInt = 64  # maximum number of concurrent calls of the environment, over all episodes
    # true: the role's max_prompt_tokens limits all tokens before each answer, including earlier answers. false:
    # max_prompt_tokens limits only the first prompt.
    bounded: bool = False

    def problems(self) -> Iterator[str]:
        """Yields an error message for each of the settings `told` and `tool_s` that is not 0 although `answers` is 1.
        With one answer, the environment inserts no tokens and takes no time between answers."""
        for name, value in {"told": self.told, "tool_s": self.tool_s}.items():
            if value and self.answers == 1:
                yield f"{name} = {value} with answers = 1: nothing follows the answer; give answers, too"
