"""Writes the evaluation sets of tandem_evaluated_qwen3_4b.yaml: data/eval/amc.jsonl and data/eval/aime.jsonl.

python examples/published/tandem_evaluation_sets.py --data-dir DIR [--out data/eval]

amc.jsonl joins the problems of AMC 2023 to 2025, aime.jsonl those of AIME 2024 to 2026. DIR has the rows of these
benchmarks, as for `megatron-rl eval`: amc25.jsonl, which is not on the Hugging Face hub, and copies of the others by
`megatron-rl fetch`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.data.benchmarks import benchmark, read_benchmark, source_of

JOINED = {"amc": ("amc23", "amc24", "amc25"), "aime": ("aime24", "aime25", "aime26")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="directory with the rows of the six benchmarks")
    parser.add_argument("--out", type=Path, default=Path("data/eval"), help="directory of the two files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, members in JOINED.items():
        rows = []
        for member in members:
            bench = benchmark(member)
            problems = read_benchmark(bench, source_of(bench, arguments.data_dir))
            rows += [
                {"problem": problem.values["question"], "answer": problem.values["answer"]} for problem in problems
            ]
        path = arguments.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    main()
