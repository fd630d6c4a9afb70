"""Conversations of episodes, as a run's store keeps them for the report."""

from __future__ import annotations

import numpy as np

from megatron_rl.config.schema import Run
from megatron_rl.run.run_directory import RunDirectory, open_run
from megatron_rl.texts.text import Decoded
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import IterationStore
from megatron_rl.types import Author, Rollout, spans_of

WORDS = ["Q", "<think>", "<step>", "a&b", "</step>", "</think>", "<script>alert(1)</script>", "<answer>"]
SAID = [*WORDS, "<tool_call>", "</tool_call>", "4 & 5", " = 9", "w" * 80, "\n"]
TOOL, ENDS, SUM, NINE, LONG, LINE = range(len(WORDS), len(SAID))
POLICY, PARTNER, ENVIRONMENT = Author.POLICY, Author.PARTNER, Author.ENVIRONMENT
CALLING = (POLICY, [3, TOOL, SUM, ENDS]), (ENVIRONMENT, [LINE, NINE, LINE]), (POLICY, [6, NINE])


def say(role, tokens):
    """Decodes tokens as places in SAID."""
    words = [SAID[token].encode() for token in tokens]
    return Decoded(b"".join(words).decode(), b"".join(words), np.cumsum([*map(len, words)], dtype=np.int64))


def talk(*parts, role="solver", agent=None, episode=None, **changes):
    """A conversation. `parts`: (author, tokens) behind a prompt of one token."""
    tokens = [0, *(token for _, turn in parts for token in turn)]
    spans = spans_of((1, Author.ENVIRONMENT, -1), *((len(turn), author, 3) for author, turn in parts))
    payload = {"question": "how <many>?", "answer": "9", "agent": agent, "episode": episode}
    values = {
        "group": "problem", "tokens": tokens, "logprobs": [0.0] * len(tokens), "spans": spans, "advantages": 0.5,
        "payload": {name: value for name, value in payload.items() if value is not None},
    }  # fmt: skip
    return Rollout(role=role, **{**values, **changes})


def keep_talks(directory, config, **rollouts) -> RunDirectory:
    """Makes the directory of a run whose only iteration had these conversations. `rollouts`: by role."""
    run = open_run(Run(dir=str(directory), name="talks"), config)
    iteration = Iteration(cycle=0, index=0, roles=tuple(rollouts), number=0)
    IterationStore(run.rollouts, decode=say).put(iteration, Collected(rollouts=rollouts, metrics={}), {})
    return run
