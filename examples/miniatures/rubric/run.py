"""Shows rubrics at work within two minutes on two CPU cores: a tiny random model learns to fulfil one, twice.

    python examples/miniatures/rubric/run.py

The responses have eight characters. Three criteria earn something, and the fourth earns nothing: that there is no
digit. In the first run that is a veto, and digits go; in the second it is none, and they stay until something else
drives them out. The judge is a server that knows the criteria by the rules of this file (rule_judge.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE, BASE = Path(__file__).parent, Path("runs/rubric")
sys.path.append(str(HERE.parent))

from rule_judge import RuleJudge, write_model  # noqa: E402  (beside the examples)

LETTERS = ["fewer than two", "two to four", "five or more"]
RUBRIC: list[dict[str, Any]] = [
    {"criterion": "It has a vowel.", "weight": 1.0},
    {"criterion": "It has a full stop.", "weight": 1.0},
    {"criterion": "It has many letters.", "weight": 1.0, "saturation": 0.5, "tiers": LETTERS},
    {"criterion": "It has no digit.", "weight": 0.0, "veto": True},
]


def main() -> None:
    BASE.mkdir(parents=True, exist_ok=True)
    write_model(BASE / "model")
    judge = Judge()
    server = RuleJudge(judge.answer)
    for name in ("veto", "without_veto"):
        rubric = [{**row, "veto": row.get("veto", False) and name == "veto"} for row in RUBRIC]
        rows = [{"question": f"{letter}:", "answer": "-", "rubric": rubric} for letter in "abcdefghijklmnop"]
        (BASE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        url = f"roles.judge.endpoint.url={server.url}"
        data = f"data.path={BASE}/{name}.jsonl"
        command = [sys.executable, "-m", "megatron_rl.main", "train", f"{HERE}/rubric.yaml", f"run.name={name}"]
        judge.digits.clear()
        shutil.rmtree(BASE / name, ignore_errors=True)  # of an earlier call
        subprocess.run([*command, url, data], check=True)
        table(name, judge.digits)


def table(name: str, digits: list[bool]) -> None:
    """Prints what the first and the last five updates saw on average. `digits`: whether each response had one."""
    lines = [json.loads(line) for line in (BASE / name / "metrics.jsonl").read_text().splitlines()]
    rows = [line["metrics"] for line in lines if line["scope"] == "generator" and "reward/outcome" in line["metrics"]]
    few = 5 * len(digits) // len(rows)  # responses of five updates
    for when, part, seen in (("first", rows[:5], digits[:few]), ("last", rows[-5:], digits[-few:])):
        mean = {
            key: sum(row[f"reward/{key}"] for row in part) / len(part) for key in ("outcome", "fulfilled", "vetoed")
        }
        metrics = {**mean, "with a digit": sum(seen) / len(seen)}
        print(
            f"{name:>12}, {when:>5} five updates: {', '.join(f'{key} {value:.2f}' for key, value in metrics.items())}"
        )


def score(criterion: str, response: str) -> int:
    """Returns the tier that a response reaches."""
    if criterion == "It has many letters.":
        letters = sum(c.isalpha() for c in response)
        return (letters > 1) + (letters > 4)
    return {
        "It has a vowel.": any(c in "aeiouAEIOU" for c in response),
        "It has a full stop.": "." in response,
        "It has no digit.": not any(c.isdigit() for c in response),
    }[criterion] * 1


class Judge:
    """Answers the rubric's questions, and remembers which responses had a digit."""

    def __init__(self) -> None:
        self.digits: list[bool] = []

    def answer(self, prompt: str) -> str:
        head, _, response = prompt.partition("\n\n")
        found = score(head.splitlines()[0], response)
        if head.startswith("It has no digit."):
            self.digits.append(not found)
        return f"\\boxed{{{found}}}"


if __name__ == "__main__":
    main()
