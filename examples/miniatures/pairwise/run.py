"""Shows BRPO at work within two minutes on two CPU cores: a tiny random model learns what a pairwise judge prefers.

    python examples/miniatures/pairwise/run.py

The judge counts vowels, and it has a bias: the response that it is shown first gets two points more. Nothing else tells
the model what is good. In the first run each pair is shown in one order, which is drawn by chance: the bias is noise.
In the second run each pair is shown in both orders, the bias cancels, and the same number of updates goes further, for
twice as many questions to the judge. The judge is a server that scores by the rules of this file (rule_judge.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE, BASE = Path(__file__).parent, Path("runs/pairwise")
sys.path.append(str(HERE.parent))

from rule_judge import RuleJudge, write_model  # noqa: E402  (beside the examples)

BIAS = 2  # points for the first place
KNOWN, WORSE = "a-e-i-o-", "--------"  # four vowels, which responses are compared with in evaluations; and none
RUNS = {"one_order": "false", "both_orders": "true"}


def main() -> None:
    BASE.mkdir(parents=True, exist_ok=True)
    write_model(BASE / "model")
    for name, letters in (("train", "abcdefghijklmnop"), ("test", "qrstuvwx")):
        rows = [{"question": f"{letter}:", "answer": KNOWN, "rejected": WORSE} for letter in letters]
        (BASE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = Judge()
    url = f"roles.judge.endpoint.url={RuleJudge(judge.answer).url}"
    command = [sys.executable, "-m", "megatron_rl.main", "train", f"{HERE}/pairwise.yaml", url]
    found = {}
    for name, both in RUNS.items():
        judge.vowels.clear()
        shutil.rmtree(BASE / name, ignore_errors=True)  # of an earlier call
        subprocess.run([*command, f"run.name={name}", f"recipe.args.both_orders={both}"], check=True)
        found[name] = list(judge.vowels)
    for name, vowels in found.items():
        table(name, vowels)


def table(name: str, vowels: list[int]) -> None:
    """Prints what the first and the last three updates saw on average, and the evaluations before and after them.
    `vowels`: of the responses as they were shown, in the order of the updates."""
    lines = [json.loads(line) for line in (BASE / name / "metrics.jsonl").read_text().splitlines()]
    rows = [line["metrics"] for line in lines if line["scope"] == "generator" and "first_wins" in line["metrics"]]
    evaluations = [line["metrics"] for line in lines if line["scope"] == "eval"]
    few = 3 * len(vowels) // len(rows)
    for when, part, seen, evaluation in (
        ("first", rows[:3], vowels[:few], evaluations[0]), ("last", rows[-3:], vowels[-few:], evaluations[-1])
    ):  # fmt: skip
        metrics = {
            "vowels of eight characters": sum(seen) / len(seen),
            "groups alike (of 16)": sum(row["groups_alike"] for row in part) / len(part),
            "the first place wins": sum(row["first_wins"] for row in part) / len(part),
            f"wins against {KNOWN}": evaluation["generator/win_rate"],
        }
        print(f"{name:>11}, {when:>5}: {', '.join(f'{key} {value:.2f}' for key, value in metrics.items())}")


class Judge:
    """Compares two texts, and remembers how many vowels those of the generator had."""

    def __init__(self) -> None:
        self.vowels: list[int] = []

    def answer(self, prompt: str) -> str:
        texts = prompt.split("\n====\n")
        first, second = (sum(c in "aeiouAEIOU" for c in text) for text in (texts[0], texts[-1]))
        if not {KNOWN, WORSE} & set(texts):
            self.vowels += [first, second]
        scores = f"<scores>{first + BIAS}, {second}</scores>"
        return f"<principles>Vowels.</principles><critique>{first} and {second}.</critique>{scores}"


if __name__ == "__main__":
    main()
