"""Rows and texts split over ranks: even shares, and results that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from one_process import CommandsAtOnce
from tiny_models import make_model
from toys import characters

from megatron_rl.engines.data_parallel_engine import DataParallelEngine, split_over_replicas
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Completion, Sampling
from megatron_rl.messages.message_codec import pack, unpack

PROMPTS = [[5, 9, 30], [8] * 17, [40], [7 + i for i in range(50)], [3, 4]]
SAMPLINGS = [Sampling(max_tokens=12, n=n, seed=n, temperature=t) for n, t in ((3, 1.0), (1, 0.0), (4, 0.7))]


class Ranks(CommandsAtOnce):
    """Commands to several ranks in one process: what is sent to each is packed and unpacked, as between processes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.sent = size, list[list[Any]]()

    def each(self, name: str, arguments: Sequence[Any], ranks: Sequence[int] | None = None, **_: object) -> list[Any]:
        assert len(arguments) == (self.size if ranks is None else len(ranks))
        self.sent.append(list(arguments))
        there = [unpack(pack(argument)) for argument in arguments]
        return [unpack(pack(self._handlers[name](argument))) for argument in there]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> EmbeddedEngine:
    made = EmbeddedEngine(make_model(tmp_path_factory.mktemp("model"), "qwen2", eos_token_id=7), tokenizer=characters())
    made.load_pretrained()
    return made


def told(completions: Sequence[Completion]) -> list[Any]:
    return [(c.tokens.tolist(), c.stop) for c in completions]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_is_drawn_and_scored_does_not_depend_on_the_number_of_ranks(engine, ranks):
    spread = DataParallelEngine(Ranks(9), "model", engine, range(2, 2 + ranks))  # a role may have some of the ranks
    sessions = [spread.session(), engine.session()]
    for session in sessions:
        for key, prompt in enumerate(PROMPTS):
            session.ask(100 + key, prompt, SAMPLINGS[key % 3])
    here, alone = (dict(session.answers()) for session in sessions)
    assert {key: told(group) for key, group in here.items()} == {key: told(group) for key, group in alone.items()}
    for key in alone:
        for one, other in zip(here[key], alone[key], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5) and one.logprobs.dtype == np.float32
    texts = [PROMPTS[3], PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    for one, other in zip(spread.score(texts), engine.score(texts), strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    for one, other in zip(spread.score_top(texts, 5), engine.score_top(texts, 5), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5) and one.ids.shape == other.ids.shape
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-5)


def test_a_wrong_ask_is_refused_on_the_driver_before_any_rank_works(engine):
    commands = Ranks(3)
    session = DataParallelEngine(commands, "model", engine).session()
    with pytest.raises(ValueError, match="prompt 4 holds token"):
        session.ask(4, [10_000], SAMPLINGS[0])
    assert commands.sent == []


def test_a_prompt_travels_once_to_a_rank(engine):
    commands = Ranks(2)
    session = DataParallelEngine(commands, "model", engine).session()
    prompt = np.arange(1, 41, dtype=np.int32).repeat(10) % 90
    for key in range(2):
        session.ask(key, prompt, Sampling(max_tokens=1, n=50))
    assert len(list(session.answers())) == 2
    assert all(len(pack(rows)) < 2 * prompt.nbytes + 50 * 60 for rows in commands.sent[0])


@pytest.mark.parametrize("samples", [[5] * 8, [5] * 7, [5], [1, 1], [], [1, 9, 2, 2, 30, 4]], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_are_dealt_evenly_and_asks_stay_whole(samples, ranks):
    shares = split_over_replicas(samples, ranks)
    assert sorted(row for share in shares for row in share) == list(range(sum(samples)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    ask_of = np.repeat(np.arange(len(samples)), samples)
    prefills = sum(len({int(ask_of[row]) for row in share}) for share in shares)
    assert prefills <= len(samples) + ranks - 1
    if len(samples) % ranks == 0 and len(set(samples)) == 1:
        assert prefills == len(samples)
