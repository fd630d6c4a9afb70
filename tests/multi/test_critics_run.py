"""Recipes with critics, trained by `megatron-rl train`'s own code on 2 ranks: the values that a critic learns where the
true values are known, and Tango, TangoAgents and Agents with a critic for each role. Exact resume
is tested in test_open_centre.py and test_resume_methods.py.
"""

from __future__ import annotations

from functools import cache

import cut_runs
import numpy as np
import pytest
from cut_runs import config, role, write_speakers
from safetensors.torch import load_file, save_file
from test_open_centre import collected_iterations, series

from megatron_rl.types import Author

pytestmark = pytest.mark.multi
WORDS = ["<eos>", "a", "b", "c"]
LONGEST, GAMMA = 5, 0.9
SOLUTIONS = [
    *("<eos>", "a", "b"),
    *(
        f"<think>{'<step>a</step>' * steps}</think><answer>\\boxed{{{c}}}</answer>"
        for steps in (1, 2)
        for c in "abcdef"
    ),
]


@cache
def known(position, count):
    """Returns the value of a chain of `position` words with `count` times `a`: each next token is any of WORDS. The
    reward is paid with the last token."""
    worth = float(count >= 2)
    after = [(worth, True)]  # <eos>
    for word in WORDS[1:]:
        now = count + (word == "a")
        last = position + 1 == LONGEST
        after.append((float(now >= 2), True) if last else (known(position + 1, now), False))
    return float(np.mean([value if ended else GAMMA * value for value, ended in after]))


def chain(base):
    """A generator that draws every token alike and is never trained, and its critic."""
    write_speakers(base, ["uniform", "start"], WORDS)
    # a prompt of two different tokens: a model sees no positions where all tokens are the same
    (base / "chain.txt").write_text("{question} b")
    file = base / "uniform/model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 0}, file, metadata={"format": "pt"})
    estimator = {"target": "gae", "args": {"gamma": GAMMA, "lam": 0.95, "critic_warmup": 1000}}
    args = {"updates": 24, "group_size": 16, "estimator": estimator, "template": f"{base}/chain.txt"}
    learning = {"samples_per_optimizer_step": 32, "optimizer": {"lr": 0.003, "decay": "cosine", "decay_steps": 192}}
    length = {"sampling": {"max_tokens": LONGEST}}
    roles = {
        "generator": role(base, model="uniform", **length),
        "critic": role(base, model="start", head="value", **length, **learning),
    }
    settings = config(
        base, "chain", "megatron_rl.recipes.ppo:Ppo", roles, args=args, prompts_per_iteration=16, save_every=0
    )
    return settings | {"reward": {"target": "critic_rewards:two_a", "workers": 1, "timeout_s": 120.0}}


def tango(base):
    write_speakers(base, ["solver"], SOLUTIONS)
    args = {
        "generator_updates": 2, "warmup_updates": 1, "generator_iterations": 1, "group_size": 4, "verifications": 4,
        "alpha_start": 0.5, "estimator": "gae", "verifier_template": f"{base}/turns.txt",
        "generator_template": f"{base}/plain.txt",
    }  # fmt: skip
    roles = {}
    for name, model, longest in (("generator", "solver", 2), ("verifier", cut_runs.VERIFIER, 2)):
        size = {"sampling": {"max_tokens": longest}}
        roles[name] = role(base, model=model, lr=0.002, **size)
        roles[f"{name}_critic"] = role(base, model=model, lr=0.01, head="value", **size)
    return config(
        base, "tango", "megatron_rl.recipes.tango:Tango", roles, args=args, reward="begins_well", save_every=0
    )


def agents(base):
    args = {
        "updates": 2, "group_size": 2, "environment": {"target": "open_centre:Counting"}, "rewards": {"letters": 1.0},
        "estimator": {"target": "gae", "args": {"level": "turn", "gamma": 0.5}},
    }  # fmt: skip
    roles = {"agent": role(base, lr=0.002), "agent_critic": role(base, model="start", head="value", lr=0.01)}
    roles = {name: own | {"model": {"path": f"{base}/{cut_runs.PLAYERS[0]}"}} for name, own in roles.items()}
    return config(base, "agents", "megatron_rl.recipes.agents:Agents", roles, args=args, save_every=0)


def tango_agents(base):
    own = cut_runs.tango_agents(base, "tango_agents")
    own["recipe"]["args"] |= {"estimator": "gae"}
    for name, part in list(own["roles"].items()):
        own["roles"][f"{name}_critic"] = {**part, "head": "value", "loss": {}}
    return own | {"run": own["run"] | {"save_every": 0}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, by one start of two ranks. -> the directory of the runs."""
    base = tmp_path_factory.mktemp("critics")
    cut_runs.write_data(base, [{"criterion": "a"}])
    cut_runs.write_players(base)
    cut_runs.run_all(base, [(one(base), None) for one in (chain, tango, agents, tango_agents)])
    return base / "runs"


def test_a_critic_learns_the_values_of_a_chain(runs):
    """The squared error from the known values, over the states that were met, is below 5 % of the variance of the
    returns. At the start it is not."""
    errors, variances = [], []
    for iteration in collected_iterations(runs / "chain", "generator", "critic"):
        found, wanted, outcomes = [], [], []
        for r in iteration.rollouts["generator"]:
            count = 0
            own = np.flatnonzero(r.trainable)
            for position, place in enumerate(own):
                found.append(r.values["value"][place])
                wanted.append(known(position, count))
                outcomes.append(GAMMA ** (len(own) - 1 - position) * r.rewards["outcome"])
                count += WORDS[r.tokens[place]] == "a"
        errors.append(np.mean((np.array(found) - wanted) ** 2))
        variances.append(np.var(outcomes))
    assert np.mean(errors[-3:]) < 0.05 * np.mean(variances) < 0.5 * errors[0], (errors, np.mean(variances))
    assert set(series(runs / "chain", "generator", "skipped")) == {1.0}, "the critic warms up in the whole run"


@pytest.mark.parametrize(("run", "solver"), [("tango", "generator"), ("tango_agents", "agent")])
def test_tango_trains_a_critic_for_each_role(runs, run, solver):
    for name in (solver, "verifier"):
        assert series(runs / run, name, "skipped") == series(runs / run, f"{name}_critic", "skipped")
        assert all(np.isfinite(series(runs / run, f"{name}_critic", "explained_variance")))
    assert series(runs / run, f"{solver}_critic", "update") == [1.0, 2.0]
    assert series(runs / run, "verifier_critic", "update") == [1.0, 2.0, 3.0]


def test_agents_have_one_value_and_one_advantage_per_turn(runs):
    for iteration in collected_iterations(runs / "agents", "agent", "agent_critic"):
        for r in iteration.rollouts["agent"]:
            turns = [np.arange(first, end) for first, end, author, _ in r.spans.tolist() if author == Author.POLICY]
            assert len(turns) == 2 and all(len(set(r.advantages[turn].tolist())) == 1 for turn in turns)
            assert not r.advantages[~r.trainable].any() and r.values["value"][r.trainable].any()
