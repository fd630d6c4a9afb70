"""Runs search in miniature: a tiny model learns to search a corpus, once or twice, rather than to guess.

    python examples/miniatures/search/run.py

The corpus has 320 persons, each with a home, a job and a boss, and is searched by BM25. A question asks for the home or
the job of a person, which takes one search, or of that person's boss, which takes two. The supervised start is made of
invented persons: it knows how documents are found and read, and nothing that is in the corpus. It seldom searches, and
often gives up after the first search where it would need a second. Reinforcement learning rewards correct answers
alone. The held-out questions are about 64 persons, and bosses among these, whom no question of the training is about.
The same is done with a corpus of other persons: what the model reaches then, it reaches without help. The conversations
are in the report's page.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import corpus  # noqa: E402
import mini_agents  # noqa: E402  (beside the examples)
import task  # noqa: E402  (beside the other example; `mini_agents` finds it)
from mini_agents import Arm, Miniature, Row, conversation  # noqa: E402

TAGS = [f"<{slash}{tag}>" for tag in ("search", "result", "answer") for slash in ("", "/")]
KNOWN = [*TAGS, "<ask>", *corpus.WORDS]
# Steps of the supervised start, and the share of answers that search: first the model learns how to search and to read,
# then to search seldom.
STAGES = [(800, 1.0), (200, 0.2)]
BATCH = 32  # as in sft.yaml
STOPS_EARLY = 0.5  # of the late answers that need two searches and make one


def write_task(files: Path, seed: int) -> None:
    """Makes the model, two corpora, the questions and the conversations of the supervised start."""
    task.write_model(files / "model", seed, KNOWN)
    rng = random.Random(seed + 1)
    held_out, taught, others = corpus.draw_persons(rng)
    documents = [corpus.document(person) for person in (*held_out, *taught)]
    rng.shuffle(documents)
    task.write_jsonl(files / "corpus.jsonl", documents)
    task.write_jsonl(files / "others.jsonl", map(corpus.document, others))
    task.write_jsonl(files / "test.jsonl", corpus.questions(held_out))
    task.write_jsonl(files / "train.jsonl", corpus.questions(taught))
    task.write_jsonl(files / "sft.jsonl", [_talk(rng, share) for steps, share in STAGES for _ in range(steps * BATCH)])


def _talk(rng: random.Random, share: float) -> dict[str, Any]:
    """Draws a conversation about invented persons: one that searches and is correct, one that stops searching too early
    where the share of searches is below 1, or one that guesses."""
    boss = corpus.invent(rng)
    person = corpus.invent(rng, boss=boss.name)
    asked, hops = rng.choice([*corpus.ASKED]), rng.choice([1, 2])
    prompt = f"<bos> {corpus.question(asked, person.name, hops)} <ask> "
    if rng.random() >= share:
        return conversation(prompt, f"<answer> {rng.choice(corpus.VALUES[asked])} </answer>")
    searches = 1 if share < 1.0 and rng.random() < STOPS_EARLY else hops
    read, said = [person, boss][:searches], []
    for found in read:
        said += [
            f"<search> {found.name} </search>",
            f" <result> {corpus.told(found, corpus.neighbour(rng, found))} </result> ",
        ]
    return conversation(prompt, *said, f"<answer> {getattr(read[-1], asked)} </answer>")


def _right(row: Row, *, hops: int) -> float | None:
    """Returns the reward of a sample whose question takes so many searches."""
    return row["rewards"]["outcome"] if corpus.hops_of(row["question"]) == hops else None


MINIATURE = Miniature(
    config=HERE / "search.yaml",
    title="questions about persons, with one search or two",
    tool="corpus",
    write_task=write_task,
    sft_steps=sum(steps for steps, _ in STAGES),
    arms=[
        Arm(
            name=name, label=label, tool="megatron_rl.environments.search_tool:SearchTool",
            args={"corpus": f"runs/search/task/{file}.jsonl", "top_k": 2},
        )
        for name, label, file in (("search", "has the answers", "corpus"), ("without", "of others", "others"))
    ],
    samples={
        "right answers, one search": lambda row: _right(row, hops=1),
        "right answers, two searches": lambda row: _right(row, hops=2),
    },
)  # fmt: skip

if __name__ == "__main__":
    mini_agents.main(MINIATURE, __doc__)
