"""An agent in an episode is one unit: a transcript that was truncated counts as often as one that was not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import assign_advantages
from megatron_rl.algorithms.estimators import ESTIMATORS
from megatron_rl.algorithms.gae import Gae, assign_gae
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.algorithms.role_credit import RoleBaselines, compare_peers
from megatron_rl.batches.data_parallel_split import split_over_replicas
from megatron_rl.batches.micro_batches import micro_batches
from megatron_rl.config.schema import LossConfig, Use
from megatron_rl.recipes.agents import Agents
from megatron_rl.training.rollouts import ages_of, measure
from megatron_rl.types import AGENT, EPISODE, STEP, Annotations, Author, Rollout, spans_of

OUTCOMES = [1.0, 0.0, 0.0, 0.0]
TURNS = [3, 2, 1, 3]  # turns of each episode; turn n has n + 2 sampled tokens


def sample(episode: int, turns: range, *, group: str = "0:t") -> Rollout:
    """Returns one sample of an episode's only agent, with the given turns. A token of the environment precedes each."""
    parts = [part for n in turns for part in ((1, Author.ENVIRONMENT, -1), (n + 2, Author.POLICY, n))]
    size = sum(count for count, *_ in parts)
    ends = np.cumsum([count for count, *_ in parts])[1::2]
    ranges = np.stack([ends - [n + 2 for n in turns], ends], axis=1)
    steps = Annotations(ranges, np.array([(episode + n) % 3 - 1.0 for n in turns]))
    return Rollout(
        role="agent", group=group, tokens=np.arange(size), logprobs=np.zeros(size), spans=spans_of(*parts),
        rewards={"outcome": OUTCOMES[episode]}, payload={EPISODE: str(episode), AGENT: "agent"}, advantages=0.0,
        values={"value": np.linspace(0, 1, size, dtype=np.float32)}, annotations={STEP: steps},
    )  # fmt: skip


def episodes(*, cut: bool) -> list[Rollout]:
    """Returns the samples of four episodes. With `cut`, each turn of the first and the last episode is a sample, and
    the samples of the two episodes alternate."""
    whole = {n: sample(n, range(count)) for n, count in enumerate(TURNS)}
    if not cut:
        return [*whole.values()]
    parts = {n: [sample(n, range(turn, turn + 1)) for turn in range(TURNS[n])] for n in (0, 3)}
    return [parts[0][0], parts[3][0], whole[1], parts[0][1], parts[0][2], parts[3][1], whole[2], parts[3][2]]


def by_episode(rollouts: list[Rollout], values) -> dict[str, list[float]]:
    """Returns, by episode, the values of its sampled tokens in order. `values`: one per rollout, a number or [T]."""
    found: dict[str, list[float]] = {}
    for rollout, own in zip(rollouts, values, strict=True):
        tokens = np.broadcast_to(own, len(rollout.tokens))[rollout.trainable]
        found.setdefault(rollout.payload[EPISODE], []).extend(np.float64(tokens).tolist())
    return found


def same(assign) -> dict[str, list[float]]:
    """Checks that a function gives the sampled tokens of cut and of whole episodes the same advantages."""
    cut, whole = (by_episode(own, [r.advantages for r in assign(own)]) for own in (episodes(cut=c) for c in (1, 0)))
    assert cut.keys() == whole.keys()
    for name in whole:
        assert cut[name] == pytest.approx(whole[name], abs=1e-6)
    return cut


def test_the_baseline_counts_a_cut_transcript_once():
    found = same(lambda own: assign_advantages(own, reward="outcome"))
    assert found["0"] == pytest.approx([1.5] * 9, abs=1e-5) and found["1"] == pytest.approx([-0.5] * 5, abs=1e-5)


def test_returns_of_a_critic_are_those_of_the_whole_transcript():
    parts = [sample(0, range(turn, turn + 1)) for turn in range(3)]
    parts = [replace(r, values={"value": np.zeros(len(r.tokens), np.float32)}) for r in parts]
    settings = Gae(gamma=0.9, level="turn", whiten=False)
    credited = assign_gae(parts, settings, reward="outcome")
    assert [r.values["returns"][-1] for r in credited.critic] == pytest.approx([0.81, 0.9, 1.0])
    assert credited.num_units == 1


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_every_estimator_counts_a_cut_transcript_once(estimator):
    same(lambda own: assign_advantages(own, reward="outcome", estimator=estimator))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp"])
def test_step_advantages_and_weights_are_those_of_the_whole_transcript(estimator):
    def assign(own):
        factors = [1.0 + int(r.payload[EPISODE]) for r in own]
        alphas = [0.1 * factor for factor in factors]
        return assign_advantages(own, reward="outcome", estimator=estimator, alpha=alphas, weights=factors)

    assert len(set(same(assign)["0"])) > 1


@pytest.mark.parametrize("level", ["token", "turn"])
def test_advantages_of_a_critic_are_those_of_the_whole_transcript(level):
    settings = Gae(gamma=0.9, lam=0.8, level=level)

    def assign(rollouts):  # the value of a token does not depend on the sample that it is in
        valued = [replace(r, values={"value": np.full(len(r.tokens), 0.3, np.float32)}) for r in rollouts]
        return assign_gae(valued, settings, reward="outcome").policy

    same(assign)


def test_moving_averages_and_peers_count_a_cut_transcript_once():
    averages = [RoleBaselines().credit(episodes(cut=cut), "outcome")[1].values["agent"] for cut in (True, False)]
    adjacent = sorted(episodes(cut=True), key=lambda r: r.payload[EPISODE])
    assert RoleBaselines().credit(adjacent, "outcome")[1].values["agent"] == averages[1]
    same(lambda own: compare_peers(own, ["all"] * len(own), "outcome"))


def test_metrics_count_a_cut_transcript_once():
    cut, whole = (measure(episodes(cut=cut)) for cut in (True, False))
    assert cut == whole and whole["samples"] == 4 and whole["reward/outcome"] == 0.25
    assert ages_of(episodes(cut=True), 5) == ages_of(episodes(cut=False), 5)


class OneReplica:
    """Puts each rollout into a micro-batch of its own, on one replica."""

    replays = shares_prefixes = False

    def shares(self, lengths, prefixes=None, groups=None):
        return micro_batches(lengths, max_tokens=int(max(lengths)), replicas=1)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_every_mean_of_the_loss_counts_a_cut_transcript_once(kind):
    loss = PolicyLoss(LossConfig(kl_coef=0.0, aggregation=kind, max_tokens=16))
    shares = {}
    for cut in (True, False):
        split = split_over_replicas(episodes(cut=cut), OneReplica(), loss=loss)
        assert len(split.outline.steps) == 1
        shares[cut] = by_episode([*split.rollouts], split.weights / split.outline.steps[0].denominator)
    for name, own in shares[False].items():
        assert shares[True][name] == pytest.approx(own)


def test_a_cut_transcript_stays_in_one_optimizer_step():
    loss = PolicyLoss(LossConfig(kl_coef=0.0))
    split = split_over_replicas(episodes(cut=True), OneReplica(), loss=loss, samples_per_step=2)
    counts = [step.micro_batches for step in split.outline.steps]
    assert len(counts) == 2  # as for four whole transcripts
    ends = np.cumsum([sum(own) for own in np.split(np.array(split.micro_batches[0]), np.cumsum(counts)[:-1])])
    steps = np.split([split.rollouts[i].payload[EPISODE] for i in split.orders[0]], ends[:-1])
    assert [set(own) for own in steps] == [{"0", "3"}, {"1", "2"}]


def test_an_episode_of_several_agents_has_several_units():
    pair = [sample(0, range(1)), sample(0, range(1))]
    apart = [replace(r, payload={EPISODE: "0", AGENT: name}) for r, name in zip(pair, "ab", strict=True)]
    assert measure(pair)["samples"] == 1 and measure(apart)["samples"] == 2


def test_agents_compare_whole_transcripts():
    tools = [{"target": "megatron_rl.contrib.calculator:Calculator"}]
    world = Use(
        target="megatron_rl.environments.tool_task:ToolTask", args={"tools": tools, "template": "calculator_tags"}
    )
    recipe = Agents(updates=1, group_size=4, environment=world)
    credited = recipe._credited(episodes(cut=True))
    assert by_episode(credited, [r.advantages for r in credited])["0"] == pytest.approx([1.5] * 9, abs=1e-5)
