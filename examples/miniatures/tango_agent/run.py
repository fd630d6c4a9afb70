"""Runs Tango over conversations in miniature: a verifier judges every turn of a model that may ask a calculator.

    python examples/miniatures/tango_agent/run.py

The generator is that of examples/miniatures/agent, which guesses products more often than it asks for them. The
verifier's supervised start compares calls with the question and answers with results, but believes four guesses in ten.
Reinforcement learning trains the verifier to agree with the outcome of conversations, and the generator on the outcome
and on the verdicts about its turns. Which turns are correct is known here: the table also has the F1 of these verdicts,
sampled at temperature 1 as all its metrics but the second. It takes 6 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

HERE, BASE = Path(__file__).parent, Path("runs/tango_agent")
sys.path.append(str(HERE.parents[2]))

from examples.miniatures.agent import run as agents  # noqa: E402  (beside this one; it makes the generator's start)
from examples.miniatures.agent.run import mini_agents, task  # noqa: E402
from examples.miniatures.tango_agent import judge  # noqa: E402
from megatron_rl.texts.text import fill, read_template  # noqa: E402

TAGS = [f"<{slash}{tag}>" for tag in ("step_verification", "step", "final_verification") for slash in ("", "/")]
NUMBERS = [f"#{number}" for number in range(1, judge.MOST_TURNS + 1)]
KNOWN = [*agents.KNOWN, *TAGS, *NUMBERS, *judge.VERDICTS.values(), "<sol>", "<ver>"]
STEPS = 700  # of the verifier's supervised start
SPOILED, TRUST = 0.15, 0.4  # in its pairs: calls and answers with a wrong digit; guesses that its teacher believes
FIGURES = {
    "generator/accuracy": "generator: correct answers, held out",
    "generator/accuracy_greedy": "the same by the likeliest tokens",
    "episodes/answers": "generator: turns in a conversation",
    "verifier/outcome_f1": "verifier: F1 of final verdicts",
    "verifier/step_f1": "verifier: F1 of verdicts on turns",
    "verifier/aligned": "verifier: one verdict for each turn",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=24, help="of the generator")
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    options = parser.parse_args()
    mini_agents.prepare(agents.MINIATURE)
    prepare(seed=2)
    settings = [f"run.seed={options.seed}", f"recipe.args.generator_updates={options.updates}"]
    mini_agents.command("train", str(HERE / "tango.yaml"), *settings)
    mini_agents.command("report", str(BASE / "tango"))
    table = mini_agents.Table(title="products of two numbers of two digits, with a calculator and a verifier of turns")
    for column in ("figure", "before", "after"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, label in FIGURES.items():
        values = [value for _, value in mini_agents.series(BASE / "tango", "eval", name, counted="generator")]
        table.add_row(label, *(f"{value:.2f}" for value in (values[0], values[-1])))
    mini_agents.console.print(table)


def prepare(seed: int) -> None:
    """Makes the verifier's files and its supervised start. What is there is kept."""
    files = BASE / "task"
    if not (BASE / "ready").exists():
        task.write_model(files / "model", seed, KNOWN)
        rng, taught = random.Random(seed), (agents.MINIATURE.base / "task/train.jsonl").read_text().splitlines()
        questions = [json.loads(line)["question"] for line in taught]
        pairs = [_pair(rng, rng.choice(questions)) for _ in range(STEPS * agents.BATCH)]
        task.write_jsonl(files / "sft.jsonl", pairs)
        (BASE / "ready").touch()
    if not (BASE / "start/model/model.safetensors").exists():
        mini_agents.command("sft", str(HERE / "sft.yaml"), f"steps={STEPS}", f"run.dir={BASE}")


def _pair(rng: random.Random, question: str) -> dict[str, str]:
    """Draws a conversation about a question, and what the teacher says of it."""
    turns, told = judge.draw_turns(rng, question, spoiled=SPOILED)
    text = judge.write_down(turns, told)
    template = read_template(str(HERE / "prompt.txt"))
    prompt = fill(template, question=question, solution=text, num_steps=str(len(turns)))
    return {"prompt": prompt, "response": judge.verification(rng, question, turns, told, TRUST)}


if __name__ == "__main__":
    main()
