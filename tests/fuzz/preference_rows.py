"""Rows of preferences and other samples: each is refused by name, or its prompt, its end and its score count once."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from chats import CHATML, chat_tokenizer
from fuzzing import Tally, tally

from megatron_rl.config.base import ConfigError
from megatron_rl.config.datasets import SftData
from megatron_rl.data.columns import OTHER_NAMES, UNSUPPORTED
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import columns_read, read_samples, sft_rollouts, unread_columns

ODD = [None, "", [], {}, 3, True, "x" * 3000, ["x"], {"a": 1}, [{"role": "user"}], [{"role": "user", "content": None}]]
COLUMNS = ["label", "reward", "margin", "system", "tools", "level", "messages", *OTHER_NAMES, *UNSUPPORTED]
KINDS = ("completion", "pair", "labelled", "rewarded", "scored", "compared", "steps")
ENDS = ("", "<|im_end|>", "<|im_end|>\n", " <|im_end|><|im_end|>")
QUESTION = "q?"  # the prompt of every row that is not damaged


def fuzz(seed: int, count: int) -> Tally:
    """Makes rows of all kinds, repeats their prompts and ends, adds columns, and damages some values."""
    tokenizer = chat_tokenizer(CHATML)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.jsonl"

        def one(rng: random.Random) -> str:
            kind = rng.choice(KINDS)
            row = sample(rng, kind)
            added = rng.sample(COLUMNS, k=rng.choice([0, 0, 1, 2]))
            row |= {column: rng.choice([*ODD, 0.5, "text"]) for column in added if column not in row}
            if damaged := rng.random() < 0.3:
                row[rng.choice([*row])] = rng.choice(ODD)
            file.write_text(json.dumps(row) + "\n")
            data = SftData(train=str(file))
            try:
                found = read_samples(data, kind=kind)
                rollouts = sft_rollouts(found, tokenizer, append_eos=True, max_tokens=2000)
            except (ConfigError, DataError):
                return "refused"
            read = columns_read(data, kind)
            lost = {column for column in (*OTHER_NAMES, *UNSUPPORTED) if row.get(column)}
            assert not lost, f"{lost} would be lost"
            present = {column for column, value in row.items() if value is not None}
            assert unread_columns(data, kind, "train", 9) == present - read
            if not damaged and "messages" not in added:
                more = 1 if kind in ("compared", "steps") else 0  # a text that is scored has one token more
                check(kind, [tokenizer.decode(rollout.tokens[: len(rollout.tokens) - more]) for rollout in rollouts])
                scores = [rollout.advantages for rollout in rollouts]
                if kind == "rewarded" and "chosen" not in row:
                    assert scores == [row["reward"]]
                if kind == "labelled" and "chosen" not in row:
                    assert scores == [1.0 if row["label"] else -1.0]
            return f"read as {kind}"

        return tally(seed, count, one)


def sample(rng: random.Random, kind: str) -> dict[str, Any]:
    """Returns a row of a kind whose prompt may stand in the responses once more, and whose responses may have ends."""
    chat, repeats = rng.random() < 0.5, rng.random() < 0.5
    answers = [f"{answer}{rng.choice(ENDS)}" for answer in ("yes", "no")]
    prompt: Any = [{"role": "user", "content": QUESTION}] if chat else QUESTION
    responses: list[Any] = [[{"role": "assistant", "content": one}] for one in answers] if chat else answers
    if kind == "steps":
        return {"prompt": QUESTION, "completions": ["a", "b"], "labels": [True, rng.random() < 0.5]}
    pair = kind in ("pair", "compared") or kind != "completion" and rng.random() < 0.3
    if repeats and (pair or chat):
        responses = [prompt + one for one in responses]
    row = {"prompt": prompt} if not repeats or rng.random() < 0.7 or not pair else {}
    row |= dict(zip(("chosen", "rejected"), responses, strict=True)) if pair else {"completion": responses[0]}
    score = {"labelled": "label", "rewarded": "reward", "scored": rng.choice(["label", "reward"])}.get(kind)
    if score is not None and not pair:
        row |= {"label": True, "reward": 0.25} if kind != "scored" and rng.random() < 0.3 else {}
        row[score] = rng.random() < 0.5 if score == "label" else rng.choice([-1.5, 0, 0.25])
    return row


def check(kind: str, texts: list[str]) -> None:
    """Raises AssertionError if a text has the prompt or the end of the response twice."""
    for text in texts:
        assert text.count(QUESTION) == 1, f"the prompt stands {text.count(QUESTION)} times in {text!r}"
        assert kind == "steps" or text.count("<|im_end|>") == (text.count("<|im_start|>") or 1), text
