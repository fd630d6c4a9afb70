"""Samples problems without a correct solution again, with the beginning of a known solution as a hint (GHPO, arXiv
2507.10628).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.base import ConfigError, PositiveShare, config
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes.dynamic_sampling import COUNTS, Group, Metrics, merged, solve_groups
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Prompt

INTRODUCTION = (
    "\nThe following text is the beginning part of the answer, which you can refer to for solving the problem:\n"
)


@config
class Hints:
    """Settings for hints: a group without a correct solution is sampled again with an increasing part of the problem's
    known solution after the question, until a solution is correct. The update trains on the prompt with the hint.
    """

    # parts of the known solution to show, as shares of its characters; tried in this order
    shares: tuple[PositiveShare, ...] = (0.25, 0.5, 0.75)
    field: str = "solution"  # payload field that holds the known solution; a data column is mapped to it in data.fields
    introduction: str = INTRODUCTION  # text between the question and the hint

    def problems(self) -> Iterator[str]:
        """Yields an error message if the setting `shares` is empty or not in rising order."""
        if not self.shares or list(self.shares) != sorted(set(self.shares)):
            yield (f"recipe.args.hints.shares = {list(self.shares)}: give at least one, in rising order")

    def retry(
        self, context: RolloutContext, role: str, groups: Sequence[Group], metrics: Metrics,
        *, sampling: Sampling, text: Callable[[Mapping[str, Any]], str],
    ) -> tuple[list[Group], Metrics]:  # fmt: skip
        """Replaces groups without a correct solution by groups sampled with hints.

        `sampling`: sampling settings of the original groups. `text`: converts a payload to the text of a prompt.

        If the prompt with the hint is too long, the group of the problem is not replaced. Returns the groups in the
        same order, and the metrics, to which hinted (number of groups sampled with hints) and hints_too_long are added.
        Raises ConfigError for a problem without the solution field.
        """
        solutions = [self._solution(group.prompt) for group in groups]
        new_groups, hinted, too_long = list(groups), set[int](), set[int]()
        # The maximum share of failed gradings was already checked for the whole round.
        # This maximum is not checked for the few samples with hints, where two failures could end the run.
        lenient = replace(context, max_failure_share=1.0)
        for share in self.shares:
            fitting = dict[int, Prompt]()
            # groups with graded solutions, none of which is correct
            for i in (i for i, group in enumerate(new_groups) if group.success_rate == 0.0):
                payload = groups[i].prompt.payload
                hint = solutions[i][: round(len(solutions[i]) * share)]
                prompt = text({**payload, "question": f"{payload['question']}{self.introduction}{hint}"})
                tokens = tokenize(context.tokenizers[role], prompt)
                if len(tokens) <= context.max_prompt_tokens[role]:
                    fitting[i] = replace(groups[i].prompt, tokens=tokens, payload={**payload, "hint_share": share})
                else:
                    too_long.add(i)
            if not fitting:
                continue
            hint_sampling = replace(sampling, seed=context.seed_for(sampling.seed, "hint", share))
            redrawn, counts = solve_groups(lenient, role, list(fitting.values()), hint_sampling)
            metrics = metrics | merged(
                [{k: v for k, v in f.items() if k.startswith(COUNTS)} for f in (metrics, counts)]
            )
            for i, group in zip(fitting, redrawn, strict=True):
                if group.solutions:
                    new_groups[i] = group.renamed(groups[i].solutions[0].rollout.group)
                    hinted.add(i)
        return new_groups, metrics | {"hinted": float(len(hinted)), "hints_too_long": float(len(too_long))}

    def _solution(self, prompt: Prompt) -> str:
        solution = prompt.payload.get(self.field)
        if not isinstance(solution, str):
            raise ConfigError(
                f"recipe.args.hints.field = {self.field!r}: problem {prompt.id} has no such text; map it in data.fields"
            )
        return solution
