"""Estimates a verifier's confidence in a solution as the share of its votes that call the solution correct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_rl.chat_template import tokenize
from megatron_rl.control_tokens import fill_quoting
from megatron_rl.engines.protocol import Engine, Sampling
from megatron_rl.evaluation.draw import draw_within
from megatron_rl.rewards.tags import step_texts
from megatron_rl.rewards.verdicts import final_verdict
from megatron_rl.text import decode

Asked = tuple[str, str]  # (question, solution), of which the verifier judges the solution


@dataclass(frozen=True, kw_only=True)
class Weigher:
    """A verifier that votes `sampling.n` times on whether a solution is correct. Its prompt template has the
    placeholders {question}, {solution} and {num_steps}."""

    engine: Engine
    tokenizer: Any
    template: str
    sampling: Sampling
    context: int | None = None

    def weigh(self, asked: Mapping[int, Asked]) -> dict[int, float]:
        """Returns {index: share of votes with the verdict CORRECT} for {index: (question, solution)}.

        A vote that cannot be parsed is not counted as CORRECT. If the context has no space for a vote, the share is 0.
        """
        prompts = {index: self._prompt(*one) for index, one in asked.items()}
        found = draw_within(self.engine, prompts, self.sampling, self.context)
        return {
            index: fmean(float(final_verdict(decode(self.tokenizer, vote.tokens).text) is True) for vote in votes)
            for index, votes in found.items()
        }

    def _prompt(self, question: str, solution: str) -> list[int]:
        values = {"question": question, "solution": solution, "num_steps": str(len(step_texts(solution)))}
        return tokenize(self.tokenizer, fill_quoting(self.tokenizer, self.template, **values))
