"""Takes real GSM8K text through the whole path on a CPU: tokenizer, tiny models, SFT, Tango, resume, report.

    python examples/miniatures/gsm8k/run.py --data PATH/TO/gsm8k/train.jsonl

The file has the rows of openai/grade-school-math ({"question", "answer"} with `#### n`). The models are far too small
for arithmetic: the generator learns the first problems of the file by heart, well enough that some samples are correct,
and reinforcement learning works on the same problems. The metrics show that every part does its work on real text; they
say nothing about mathematics.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.texts.text import fill

HERE = Path(__file__).parent
BASE = Path("runs/gsm8k")
PLACES = (HERE.parents[3] / "shared/data/gsm8k/train.jsonl", Path("data/gsm8k/train.jsonl"))
PROBLEMS = 64  # problems that the models learn by heart
BATCH = 32  # pairs in one SFT step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="GSM8K train.jsonl")
    parser.add_argument(
        "--sft-steps",
        type=int,
        default=220,
        help="SFT steps of each role; 400 learn the problems so well that nothing is left to reinforce",
    )
    options = parser.parse_args()
    source = options.data or next((p for p in PLACES if p.exists()), None)
    if source is None or not source.exists():
        sys.exit(
            f"no GSM8K file at {options.data or PLACES[0]}: give one with --data "
            "(openai/grade-school-math, train.jsonl)"
        )
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    prepare(rows, options.sft_steps)
    for name, model in (("generator", "task/model"), ("verifier", "task/model")):
        if not (BASE / name / "model/model.safetensors").exists():
            program(
                "sft",
                f"model.path={BASE}/{model}",
                f"data.train={BASE}/task/{name}_sft.jsonl",
                f"steps={options.sft_steps}",
                "optimizer.lr=2e-3",
                "optimizer.min_lr=2e-4",
                "optimizer.warmup_steps=20",
                "optimizer.decay=cosine",
                f"optimizer.decay_steps={options.sft_steps}",
                f"samples_per_step={BATCH}",
                f"run.name={name}",
                f"run.dir={BASE}",
                "run.save_every=100",
                "launch.nproc=2",
            )
    program("train", str(HERE / "tango.yaml"), "run.iterations=2", "run.resume=auto")
    # The same run, longer: it goes on from its checkpoint.
    program("train", str(HERE / "tango.yaml"), "run.resume=must")
    program("report", str(BASE / "tango"))
    print((BASE / "tango/summary.json").read_text())


def prepare(rows: list[dict[str, str]], steps: int) -> None:
    """Writes tokenizer and random model, the problems, and SFT pairs of both roles."""
    task = BASE / "task"
    if (task / "verifier_sft.jsonl").exists():
        return
    task.mkdir(parents=True, exist_ok=True)
    chosen = rows[:PROBLEMS]
    write(task / "train.jsonl", chosen)
    solved = [
        (row["question"], solution_steps(row["answer"]), row["answer"].split("####")[-1].strip()) for row in chosen
    ]
    templates = {name: (HERE / f"{name}.txt").read_text().removesuffix("\n") for name in ("generator", "verifier")}
    rng = random.Random(0)
    pairs = [(fill(templates["generator"], question=q), solution(lines, answer)) for q, lines, answer in solved]
    write(
        task / "generator_sft.jsonl",
        [{"prompt": p, "response": r} for p, r in (rng.choice(pairs) for _ in range(steps * BATCH))],
    )
    judged = [verification(rng, templates["verifier"], *rng.choice(solved)) for _ in range(steps * BATCH)]
    write(task / "verifier_sft.jsonl", judged)
    write_model(
        task / "model",
        [r["question"] + r["answer"] for r in rows] + [p["prompt"] + p["response"] for p in judged[:500]],
    )


def solution_steps(answer: str) -> list[str]:
    """Returns the lines of a GSM8K answer, without its calculator marks."""
    return [
        re.sub(r"<<.*?>>", "", line).strip() for line in answer.split("####")[0].strip().splitlines() if line.strip()
    ]


def solution(lines: list[str], answer: str) -> str:
    steps = "\n".join(f"<step>{line}</step>" for line in lines)
    return f"<think>\n{steps}\n</think>\n<answer>\\boxed{{{answer}}}</answer>"


def verification(rng: random.Random, template: str, question: str, lines: list[str], answer: str) -> dict[str, str]:
    """Draws an SFT pair of the verifier: a correct solution, or one that is wrong from some step on, and its
    verdicts."""
    wrong_from = rng.randrange(len(lines)) if rng.random() < 0.5 else len(lines)
    shown = [line if i < wrong_from else corrupt(rng, line) for i, line in enumerate(lines)]
    final = answer if wrong_from == len(lines) else str(rng.randrange(2, 500))
    word = {True: "\\boxed{CORRECT}", False: "\\boxed{INCORRECT}"}
    blocks = "\n".join(f"<step>Step {i + 1} Analysis: {word[i < wrong_from]}</step>" for i in range(len(lines)))
    verdict = word[wrong_from == len(lines)]
    response = (
        f"<step_verification>\n{blocks}\n</step_verification>\n<final_verification>{verdict}</final_verification>"
    )
    prompt = fill(template, question=question, solution=solution(shown, final), num_steps=str(len(lines)))
    return {"prompt": prompt, "response": response}


def corrupt(rng: random.Random, line: str) -> str:
    """Returns the line with another last number."""
    numbers = list(re.finditer(r"\d+", line))
    if not numbers:
        return line + f" {rng.randrange(100)}"
    last = numbers[-1]
    return line[: last.start()] + str(int(last.group()) + rng.randrange(1, 20)) + line[last.end() :]


def write_model(directory: Path, texts: list[str]) -> None:
    """Writes a byte-level BPE of 2048 tokens learned from the texts, and a random Qwen2 of about 1.5 M parameters."""
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, vocab_size=2048, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def program(*arguments: str) -> None:
    """Runs `megatron-rl *arguments`. Leaves with its status when it fails."""
    status = subprocess.run([sys.executable, "-m", "megatron_rl.main", *arguments]).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
