"""A run of Tango through the real loop and collector, with two context of logits as policies and engines that say what
they are told.
"""

from pathlib import Path

import pytest
import specs as config_checks
from fake_policy import TablePolicy
from loops import Setup, train
from test_recipes import TOKENIZER, Problems, context_of, mixed_verifier, problems, solution
from toys import streaming

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import LossConfig, TrainConfig
from megatron_rl.recipes.tango import Tango
from megatron_rl.run.console import headline
from megatron_rl.training import loop
from megatron_rl.training.collector import Collector, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.device_memory import DeviceMemory
from megatron_rl.training.held_out_sets import HeldOutSet
from megatron_rl.training.iteration import EvaluationDraws
from megatron_rl.training.store import IterationStore
from megatron_rl.training.update import Trainee

ROOT = Path(__file__).parents[3]


class Reader(Problems):
    """Two problems, again and again; it has no place."""

    dropped = 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_the_loop_trains_both_roles_of_tango_and_refits_the_role_that_learned(tmp_path):
    for name, text in (("g", "Q {question}\n"), ("v", "Q {question} S {solution} K {num_steps}\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    recipe = Tango(
        generator_updates=4, generator_iterations=2, warmup_updates=1, group_size=2, verifications=3,
        balanced_per_class=2,
        generator_template=str(tmp_path / "g.txt"), verifier_template=str(tmp_path / "v.txt"),
    )  # fmt: skip
    context = context_of(lambda p, i, j, s: solution(2, "yes" if (i + j) % 2 else "no"), mixed_verifier)
    lines, saved, generated, trainees, refits = [], [], [], {}, {}
    for name in recipe.roles():
        policy = TablePolicy(len(TOKENIZER))
        refits[name] = streaming(policy, context.engines[name])
        trainees[name] = Trainee(policy=policy, loss=PolicyLoss(LossConfig(kl_coef=0.001)))
    progress = loop.Progress()
    maker = RolloutMaker(
        recipe=recipe, readers=dict.fromkeys(trainees, Reader(2)), context=context, prompts_per_iteration=2,
        generated=lambda *interval: generated.append(interval),
    )  # fmt: skip
    iterations = upcoming(recipe.schedule(), progress.state_dict())
    store = IterationStore(tmp_path / "rollouts")
    collector = Collector(maker, CreditStage(recipe), iterations, store, max_staleness=0)
    setup = Setup(
        memory=DeviceMemory(trainees),
        refits=refits,
        policy_of={name: name for name in trainees},
        recipe=recipe,
        context=context,
        iterations=collector,
        held_out=[HeldOutSet(name="held", prompts=problems(2), draws=EvaluationDraws())],
        log=lambda cycle, scope, m, *, iteration: lines.append((iteration, cycle, scope, m)),
        save=lambda number, state: saved.append(number),
    )
    assert train(setup, loop.Plan(iterations=sum(map(len, recipe.schedule())), save_every=4), progress)
    g, v = "generator", "verifier"
    assert [line[:3] for line in lines] == [
        (0, 0, "eval"), (0, 0, v), (1, 1, g), (2, 1, g), (3, 1, v), (4, 2, g), (5, 2, g), (6, 2, v), (7, 3, "eval"),
    ]  # fmt: skip
    assert progress.updates == {g: 4, v: 3} and saved == [4, 7]
    assert {interval[:2] for interval in generated} == {(i, role) for i in range(7) for role in (g, v)}
    assert all(began <= ended for *_, began, ended in generated)
    assert [context.engines[name].version for name in (g, v)] == [4, 3]
    assert all(m["version_lag"] == 0 and m["kl_ref"] >= 0 for _, _, scope, m in lines if scope != "eval")
    assert [m["alpha"] for _, _, scope, m in lines if scope == g] == pytest.approx(
        [0.1, 0.0316, 0.01, 0.00316], rel=0.01
    )
    wanted = {"reward/outcome", "length", "groups_without_signal", "graded/error", "reviews_dropped", "verdicts_match"}
    assert all(wanted <= set(m) for _, _, scope, m in lines if scope != "eval")
    shown = [(scope, headline(m)["reward"], m) for _, _, scope, m in lines if scope != "eval"]
    assert all(reward == m["reward/outcome" if scope == g else "reward/verifier"] for scope, reward, m in shown)


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        (["generator_updates=6"], []),
        (["generator_updates=2"], ["verifier is trained in the first 8 iterations alone, before any other role is"]),
        (
            ["generator_updates=2", "warmup_updates=0"],
            ["verifier has no iteration in a run of this length: it is not trained"],
        ),
        (["generator_updates=2", "train_verifier=false"], []),
    ],
)
def test_check_notes_a_verifier_whose_iteration_never_comes(settings, notes, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = [f"recipe.args.{setting}" for setting in settings]
    config = config_files.load(TrainConfig, ["examples/miniatures/last_letter/tango.yaml"], arguments)
    lines = config_checks.explain_recipe(config_checks.spec_of(config))
    assert [line.removeprefix("note: ") for line in lines if line.startswith("note: ")] == notes
