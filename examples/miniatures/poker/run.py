"""Runs two models against each other in miniature: they learn to play Kuhn poker.

    python examples/miniatures/poker/run.py

Both begin with one model that checks, bets, folds and calls at random, whatever its card. Each has weights of its own
from then on, and learns from the chips of its own agent. How they play is read from their log-probs at the game's
twelve information sets, before the run and after every other update; what that is worth is computed over the whole
game. Shown are the policies of the start, of the end, and the average of all those on the way: policies that learn
against each other need not settle, and their average can be exploited less than they can on the way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

HERE, BASE = Path(__file__).parent, Path("runs/poker")
sys.path += [str(HERE.parent), str(HERE.parent / "evolve")]

import task  # noqa: E402  (beside the other example)
from equilibria import (  # noqa: E402
    GAME_VALUE,
    PolicyTable,
    average_policy,
    best_response,
    equilibrium,
    exploitability,
    hand_value,
    information_sets,
)
from mini_runs import command, console, series  # noqa: E402  (beside the examples)
from rich.table import Table  # noqa: E402

from megatron_rl.contrib.kuhn_poker import AGENTS, CARDS, KuhnPoker, legal_actions  # noqa: E402

STEPS = 300  # of the supervised start, as in sft.yaml
HANDS = 1024
# By what a hand is compared with: the others with the same cards, or the usual hand of its role as SPIRAL does.
ARMS = {"task": [], "ema": ["recipe.args.compared=ema", "recipe.args.group_size=1", "run.prompts_per_iteration=512"]}
KNOWN = [*CARDS, *AGENTS, "nothing", "check", "bet", "fold", "call", "<act>"]
# the player in whose policy the first agent's bluffs are half of what an equilibrium allows
MIDDLE = equilibrium(1 / 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compared", choices=list(ARMS), default="task", help="what a hand is compared with")
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="seed of reinforcement learning")
    options, overrides = parser.parse_known_args()
    prepare(seed=1)
    steps = [f"roles.{agent}.optimizer.decay_steps={options.updates}" for agent in AGENTS]
    command(
        "train", str(HERE / "poker.yaml"), f"run.seed={options.seed}", f"recipe.args.updates={options.updates}",
        f"run.name=compared_{options.compared}", *steps, *ARMS[options.compared], *overrides,
    )  # fmt: skip
    show(BASE / f"compared_{options.compared}")


def prepare(seed: int) -> None:
    """Makes the task's files and the model that both agents begin with. What is there is kept."""
    files = BASE / "task"
    if not (BASE / "ready").exists():
        task.write_model(files / "model", seed, KNOWN)
        task.write_jsonl(files / "hands.jsonl", [{"question": f"hand {i}"} for i in range(HANDS)])
        task.write_jsonl(files / "table.jsonl", [{"question": "all hands"}])
        task.write_jsonl(files / "sft.jsonl", pairs() * STEPS)
        (BASE / "ready").touch()
    if not (BASE / "start/model/model.safetensors").exists():
        command("sft", str(HERE / "sft.yaml"), f"steps={STEPS}", f"run.dir={BASE}")


def pairs() -> list[dict[str, str]]:
    """Returns the 60 samples of a batch: both legal answers at every information set, each after all that the agent was
    told and said; and the same places with a card named first, where the answer is to bet or call with that card alone.
    These keep the cards apart in a model that need not look at them to play at random."""
    game = KuhnPoker(template=str(HERE / "prompt.txt"), answered=" {said} <act> ", tag=None)
    rows = []
    for agent in AGENTS:
        for card, said in information_sets(agent).values():
            before = f"{game.told(card, ())} {said[0]} <eos>" if len(said) == 2 else ""
            prompt = before + game.told(card, said)
            rows += [{"prompt": prompt, "response": action} for action in legal_actions(said)]
            for named in CARDS:
                asked = f"<bos> {named}" + prompt.removeprefix("<bos>")
                rows.append({"prompt": asked, "response": legal_actions(said)[card == named]})
    return rows


def policies(run: Path, agent: str) -> list[dict[str, float]]:
    """Returns the agent's policy before the run and after every evaluated update."""
    shares = {name: series(run, "eval", f"{agent}/{name}", counted="first") for name in information_sets(agent)}
    counts = {len(points) for points in shares.values()}
    return [{name: points[i][1] for name, points in shares.items()} for i in range(min(counts))]


def show(run: Path) -> None:
    """Prints how the agents play, and what that is worth."""
    found = {agent: policies(run, agent) for agent in AGENTS}
    shown = {
        "start": {agent: own[0] for agent, own in found.items()},
        "end": {agent: own[-1] for agent, own in found.items()},
        "average": {agent: average_policy(own) for agent, own in found.items()},
        "later half": {agent: average_policy(own[len(own) // 2 :]) for agent, own in found.items()},
    }
    table = Table(title="probability of a bet or call")
    for column in ("agent", "card, and what was said", *shown, "equilibria"):
        table.add_column(column, justify="left" if column.startswith(("agent", "card")) else "right")
    least, most = equilibrium(0.0), equilibrium(1 / 3)
    for agent in AGENTS:
        for name in information_sets(agent):
            known = f"{least[name]:.2f}" + ("" if most[name] == least[name] else f" to {most[name]:.2f}")
            table.add_row(agent, name, *(f"{both[agent][name]:.2f}" for both in shown.values()), known)
        table.add_section()
    console.print(table)
    console.print(worth(shown))
    far = [point for _, point in series(run, "eval", "exploitability", counted="first")]
    averages = [exploitability(*(average_policy(found[agent][: i + 1]) for agent in AGENTS)) for i in range(len(far))]
    places = [int(share * (len(far) - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for label, values in (("of the policies", far), ("of their average so far", averages)):
        console.print(f"exploitability {label}, from start to end:", *(f"{values[place]:.3f}" for place in places))
    legal = min(point for agent in AGENTS for _, point in series(run, "eval", f"{agent}/legal", counted="first"))
    console.print(f"least share of legal answers at any information set and time: {legal:.3f}")


def worth(shown: Mapping[str, Mapping[str, PolicyTable]]) -> Table:
    """Makes the table of chips that each agent wins in a hand, computed over the whole game."""
    start = shown["start"]
    rows = {
        "exploitability of both": lambda first, second: exploitability(first, second),
        "first: against its opponent": lambda first, second: hand_value(first, second),
        "first: against the start": lambda first, second: hand_value(first, start["second"]),
        "first: against an equilibrium": lambda first, second: hand_value(first, MIDDLE),
        "first: against a best response": lambda first, second: -best_response("second", first)[0],
        "second: against the start": lambda first, second: -hand_value(start["first"], second),
        "second: against an equilibrium": lambda first, second: -hand_value(MIDDLE, second),
        "second: against a best response": lambda first, second: -best_response("first", second)[0],
    }
    table = Table(title=f"chips a hand (of the game: {GAME_VALUE:.3f} for the first agent)")
    table.add_column("figure")
    for column in (*shown, "equilibrium"):
        table.add_column(column, justify="right")
    for label, metric in rows.items():
        values = [metric(both["first"], both["second"]) for both in (*shown.values(), {s: MIDDLE for s in AGENTS})]
        table.add_row(label, *(f"{value:+.3f}" for value in values))
    return table


if __name__ == "__main__":
    main()
