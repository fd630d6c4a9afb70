"""Writes rows/train.jsonl and rows/test.jsonl from chain_sum of reasoning-gym 0.1.25, which must be installed.

    python examples/studies/real_model/make_rows.py          # writes what the repository has

Three terms of one digit, seed 7. A question is held out where its SHA-256 says so (one in five).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROWS = Path(__file__).parent / "rows"
SETTINGS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SEED, DRAWS, TEST = 7, 1000, 128


def main() -> None:
    import reasoning_gym

    drawn = reasoning_gym.create_dataset("chain_sum", seed=SEED, size=DRAWS, **SETTINGS)
    found = {item["metadata"]["expression"]: item["answer"] for item in drawn}
    rows = [{"question": f"{expression} =", "answer": answer} for expression, answer in found.items()]
    held = [row for row in rows if hashlib.sha256(row["question"].encode()).digest()[0] % 5 == 0]
    train = [row for row in rows if row not in held]
    ROWS.mkdir(exist_ok=True)
    for name, part in (("train", train), ("test", held[:TEST])):
        (ROWS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(name, len(part))


if __name__ == "__main__":
    main()
