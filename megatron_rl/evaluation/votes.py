"""Estimates a verifier's confidence in a solution: the share of its votes that call the solution correct, or the
probability that the verifier assigns to the answer yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import Engine, Sampling, Tokens
from megatron_rl.evaluation.draw import draw_within, limit
from megatron_rl.rewards.verdicts import final_verdict
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.control_tokens import fill_quoting
from megatron_rl.texts.tags import step_texts
from megatron_rl.texts.text import decode

Asked = tuple[str, str]  # (question, solution); the verifier judges the solution


@dataclass(frozen=True, kw_only=True)
class Weigher:
    """A verifier that votes `sampling.n` times on whether a solution is correct, or answers yes or no. Its prompt
    template has the placeholders {question}, {solution} and {num_steps}."""

    engine: Engine
    tokenizer: Any
    template: str
    sampling: Sampling
    context: int | None = None
    answers: tuple[str, str] | None = None  # texts of the answers (yes, no); if set, their probabilities replace votes

    def weigh(self, pairs: Mapping[int, Asked]) -> dict[int, float]:
        """Returns {index: share of votes with the verdict CORRECT} for {index: (question, solution)}. If the field
        `answers` is set, returns the result of `probabilities` instead.

        A vote that cannot be parsed is not counted as CORRECT. If the context has no space for a vote, the share is 0.
        """
        prompts = {index: self._prompt(*pair) for index, pair in pairs.items()}
        if self.answers is not None:
            return self.probabilities(prompts, self.answers)
        drawn = draw_within(self.engine, prompts, self.sampling, self.context)
        return {
            index: fmean(float(final_verdict(decode(self.tokenizer, vote.tokens).text) is True) for vote in votes)
            for index, votes in drawn.items()
        }

    def probabilities(self, prompts: Mapping[int, Tokens], answers: tuple[str, str]) -> dict[int, float]:
        """Returns {index: P(yes) / (P(yes) + P(no))}, in which P is the probability of an answer directly after the
        prompt (generative verifiers, arXiv 2408.15240). The value is 0 if the prompt leaves no space for the answers in
        the context. `prompts`: {index: prompt}. `answers`: texts of the answers (yes, no).
        """
        ends = [self.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        longest = max(map(len, ends))
        fitting = [index for index, prompt in prompts.items() if limit(len(prompt), longest, self.context) == longest]
        scores = self.engine.score([[*prompts[index], *end] for index in fitting for end in ends])
        sums = np.array([logp[len(logp) - len(ends[i % 2]) :].sum() for i, logp in enumerate(scores)]).reshape(-1, 2)
        shares = 1 / (1 + np.exp(np.clip(sums[:, 1] - sums[:, 0], -500, 500)))
        return dict.fromkeys(prompts, 0.0) | dict(zip(fitting, shares.tolist(), strict=True))

    def _prompt(self, question: str, solution: str) -> list[int]:
        values = {"question": question, "solution": solution, "num_steps": str(len(step_texts(solution)))}
        return tokenize(self.tokenizer, fill_quoting(self.tokenizer, self.template, **values))
