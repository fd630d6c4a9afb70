"""Recipes with critics, trained by `megatron-rl train`'s own code on 2 ranks: the values that a critic learns where
the true values are known, PPO with a critic that shares the policy, compared with a calculation in torch, Tango,
TangoAgents and Agents with a critic for each role. Exact resume is tested in test_open_centre.py and
test_resume_methods.py.
"""

from __future__ import annotations

from functools import cache

import cut_runs
import numpy as np
import pytest
import torch
from cut_runs import config, role, write_speakers
from safetensors.torch import load_file, save_file
from test_open_centre import credited_iterations, series
from tiny_models import make_scored
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from megatron_rl.texts.tags import step_texts
from megatron_rl.types import STEP, Author

pytestmark = pytest.mark.multi
WORDS = ["<eos>", "a", "b", "c"]
LONGEST, GAMMA = 5, 0.9
SHARED = {"lr": 0.01, "eps": 1e-4, "coef": 0.5, "clip": 0.2, "lam": 0.95}
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


def shared(base):
    """PPO whose critic is a value head on the generator's own policy."""
    write_speakers(base, ["both"], WORDS)
    optimizer = {"lr": SHARED["lr"], "eps": SHARED["eps"], "weight_decay": 0.0}
    args = {"updates": 16, "group_size": 2, "estimator": {"target": "gae", "args": {"lam": SHARED["lam"]}}}
    loss = {"value_coef": SHARED["coef"], "value_clip": SHARED["clip"]}
    generator = role(base, model="both", sampling={"max_tokens": LONGEST}, optimizer=optimizer, loss=loss)
    settings = config(
        base, "shared", "megatron_rl.recipes.ppo:Ppo",
        {"generator": generator, "critic": {"same_as": "generator", "head": "value"}},
        args=args | {"template": f"{base}/chain.txt"}, prompts_per_iteration=32, save_every=0,
    )  # fmt: skip
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


def stepped(base):
    """PPO with a process reward model, which is random here."""
    write_speakers(base, ["solver", "critic", "steps"], SOLUTIONS)
    PreTrainedTokenizerFast.from_pretrained(base / "steps").save_pretrained(make_scored(base / "steps"))
    size = {"sampling": {"max_tokens": 2}}
    roles = {
        "generator": role(base, model="solver", lr=0.002, **size),
        "critic": role(base, model="critic", head="value", lr=0.01, **size),
        "reward": role(base, model="steps_scored", head="score", **size),
    }
    args = {
        "updates": 2, "group_size": 4, "template": f"{base}/plain.txt",
        "reward_model": {"step_weight": 0.5, "step_separator": " b"},
    }  # fmt: skip
    return config(base, "stepped", "megatron_rl.recipes.ppo:Ppo", roles, args=args, reward="begins_well", save_every=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, by one start of two ranks. -> the directory of the runs."""
    base = tmp_path_factory.mktemp("critics")
    cut_runs.write_data(base, [{"criterion": "a"}])
    cut_runs.write_players(base)
    cut_runs.run_all(base, [(one(base), None) for one in (chain, shared, tango, agents, tango_agents, stepped)])
    return base / "runs"


@pytest.mark.matrix
def test_a_critic_learns_the_values_of_a_chain(runs):
    """The squared error from the known values, over the states that were met, is below 5 % of the variance of the
    returns. At the start it is not."""
    errors, variances = [], []
    for iteration in credited_iterations(runs / "chain"):
        found, wanted, outcomes = [], [], []
        for r in iteration.rollouts["critic"]:
            count = 0
            own = np.flatnonzero(r.trainable)
            for position, place in enumerate(own):
                found.append(r.values["old_value"][place])
                wanted.append(known(position, count))
                outcomes.append(GAMMA ** (len(own) - 1 - position) * r.rewards["outcome"])
                count += WORDS[r.tokens[place]] == "a"
        errors.append(np.mean((np.array(found) - wanted) ** 2))
        variances.append(np.var(outcomes))
    assert np.mean(errors[-3:]) < 0.05 * np.mean(variances) < 0.5 * errors[0], (errors, np.mean(variances))
    assert set(series(runs / "chain", "generator", "skipped")) == {1.0}, "the critic warms up in the whole run"


@pytest.mark.matrix
def test_ppo_with_a_critic_that_shares_the_policy_learns(runs):
    rewards = series(runs / "shared", "generator", "reward/outcome")
    assert rewards[0] < 0.5 < 0.9 < np.mean(rewards[-3:]), rewards
    errors = series(runs / "shared", "critic", "value_error")
    assert np.mean(errors[-3:]) < 0.1 * errors[0], errors
    assert not (runs / "shared/models/critic").exists(), "the critic has no model of its own"


def test_ppo_with_a_critic_that_shares_the_policy_by_hand(runs):
    """The first four updates, computed with transformers and torch from the rollouts of the run: the losses, and the
    values before each update."""
    model = AutoModelForCausalLM.from_pretrained(runs.parent / "both", dtype=torch.float32, attn_implementation="eager")
    size = model.config.hidden_size
    drawn = torch.randn(1, size, generator=torch.Generator().manual_seed(0))  # run.seed is 0
    head = torch.nn.Parameter(drawn / (size + 1))
    parameters = [*model.parameters(), head]
    optimizer = torch.optim.AdamW(parameters, lr=SHARED["lr"], betas=(0.9, 0.999), eps=SHARED["eps"], weight_decay=0.0)
    losses = series(runs / "shared", "generator", "loss")
    every = [*credited_iterations(runs / "shared")]
    for number, iteration in enumerate(every[:4]):
        total, tokens = 0.0, 0
        for own in iteration.rollouts["generator"]:
            ids = torch.from_numpy(own.tokens).long()
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, :-1]
            logprobs = model.lm_head(hidden).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            trained = torch.from_numpy(own.trainable[1:])
            advantages, old = (
                torch.from_numpy(np.array(given[1:], np.float32))[trained]
                for given in (own.advantages, own.values["value"])
            )
            returns, after = old.clone(), 0.0  # value plus advantage, from the last token on
            for place in reversed(range(len(old))):
                last = place == len(old) - 1
                change = (own.rewards["outcome"] if last else float(old[place + 1])) - float(old[place])
                after = change + SHARED["lam"] * after
                returns[place] += after
            values = (hidden @ head[0])[trained]
            assert torch.allclose(values, old, atol=1e-5), (number, values, old)
            clipped = old + (values - old).clamp(-SHARED["clip"], SHARED["clip"])
            errors = torch.maximum((values - returns).square(), (clipped - returns).square())
            ratios = (logprobs[trained] - logprobs[trained].detach()).exp()
            total = total + (-ratios * advantages + SHARED["coef"] * 0.5 * errors).sum()
            tokens += int(trained.sum())
        loss = total / tokens
        assert loss.item() == pytest.approx(losses[number], abs=1e-6), number
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


@pytest.mark.parametrize(("run", "solver"), [("tango", "generator"), ("tango_agents", "agent")])
def test_tango_trains_a_critic_for_each_role(runs, run, solver):
    for name in (solver, "verifier"):
        assert series(runs / run, name, "skipped") == series(runs / run, f"{name}_critic", "skipped")
        assert all(np.isfinite(series(runs / run, f"{name}_critic", "explained_variance")))
    assert series(runs / run, f"{solver}_critic", "update") == [1.0, 2.0]
    assert series(runs / run, "verifier_critic", "update") == [1.0, 2.0, 3.0]


def test_a_process_reward_model_scores_the_steps_of_solutions(runs):
    """The rewards of the steps are those of transformers' classifier at the ends of the steps."""
    directory = runs.parent / "steps_scored"
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(runs.parent / "steps")
    counts = []
    for iteration in credited_iterations(runs / "stepped"):
        for own in iteration.rollouts["generator"]:
            steps = own.annotations_of(STEP)
            texts = step_texts(tokenizer.decode(own.response, skip_special_tokens=True))
            assert len(texts) == len(steps)
            counts.append(len(texts))
            if not texts:
                continue
            ids, ends = [*tokenizer(f"{own.payload['question']} a")["input_ids"]], []
            for text in texts:
                ids += tokenizer(text)["input_ids"] + tokenizer(" b")["input_ids"]
                ends.append(len(ids) - 1)
            with torch.no_grad():
                scores = model.score(model.model(torch.tensor([ids])).last_hidden_state)[0, ends, 0]
            np.testing.assert_allclose(steps.scores, (2 * scores.sigmoid() - 1) / len(texts), atol=1e-6)
    assert {1, 2} <= set(counts), counts
    assert series(runs / "stepped", "generator", "update") == [1.0, 2.0]


def test_agents_have_one_value_and_one_advantage_per_turn(runs):
    for iteration in credited_iterations(runs / "agents"):
        for r in iteration.rollouts["agent"]:
            turns = [np.arange(first, end) for first, end, author, _ in r.spans.tolist() if author == Author.POLICY]
            assert len(turns) == 2 and all(len(set(r.advantages[turn].tolist())) == 1 for turn in turns)
            assert not r.advantages[~r.trainable].any() and r.values["value"][r.trainable].any()
