"""Score centering: over a small vocabulary, the expected gradient is the sum over all tokens, weighted by the engine's
probabilities, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_rl.algorithms.centering import ENGINE_CANDIDATES, OLD_CANDIDATES
from megatron_rl.algorithms.objectives import objective
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import CANDIDATES, Batch, Statistics
from megatron_rl.config.schema import ConfigError, CorrectionConfig, LossConfig

VOCABULARY = 60
OBJECTIVES = {
    "reinforce": {},
    "clipped": {},
    "clipped with dual clip": {"dual_clip": 1.5},
    "cispo": {"cap": 1.2},
    "sapo": {},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.02},
    "dppo_kl": {"clip_low": 0.002, "clip_high": 0.002},
    "test_centering:tempered": {"power": 0.5},
    "test_centering:unlikely": {},
    "test_centering:told_old": {},
}
CORRECTIONS = {
    "none": None,
    "truncate": CorrectionConfig(kind="truncate", low=0.5, high=1.3),
    "mask": CorrectionConfig(kind="mask", low=0.7, high=1.4),
    "drop": CorrectionConfig(kind="drop", low=0.7, high=1.4),
}


def unlikely(live, batch):
    """A user's objective, which trains where the policy is unsure."""
    return torch.where(live.entropy > 1.0, -batch.advantages * live.logprobs, 0.0)


@objective(needs=["advantages", "old"])
def told_old(live, batch):
    return -batch.advantages * (live.logprobs - batch.old).exp()


@objective(reads_correction=True)
def corrected(live, batch):
    return -batch.advantages * live.logprobs * batch.values["correction"]


def by_length(live, batch):
    return -batch.advantages * live.logprobs / batch.spread(batch.lengths)


def tempered(live, batch, *, power):
    """A user's objective: the ratio to the power of a half, as a weight."""
    return -batch.advantages * ((live.logprobs - batch.old).detach() * power).exp() * live.logprobs


class Case:
    """Logits of the policy, which moved since the start of the update if `steps`, and the distribution of an engine."""

    def __init__(self, engine: str, *, steps: bool, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)

        def noise(scale: float) -> torch.Tensor:
            return scale * torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)

        base = noise(2.0)
        self.old, live = base.log_softmax(-1), base + noise(0.25 if steps else 0.0)
        logits = {"quantised": base + noise(0.2), "stale": base + noise(0.5), "cut": base, "same": base}[engine]
        if engine == "cut":  # top-p of 0.9
            ordered, order = base.softmax(-1).sort(descending=True)
            logits = base.index_fill(0, order[ordered.cumsum(0) - ordered >= 0.9], -torch.inf)
        self.engine = logits.log_softmax(-1)
        self.logits = live.requires_grad_()

    def gradient(self, config: LossConfig, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the expected gradient of the logits: of a batch in which every token of the vocabulary is sampled
        once and has the engine's probability as its weight."""
        live, sampled = self.logits.log_softmax(-1), torch.isfinite(self.engine)
        k, count = max(1, config.centering), int(sampled.sum())
        ids = self.engine.topk(k).indices
        rows = {ENGINE_CANDIDATES: self.engine[ids], OLD_CANDIDATES: self.old[ids], CANDIDATES: ids}
        batch = Batch(
            tokens=torch.arange(count), labels=torch.arange(count), mask=torch.ones(count, dtype=torch.bool),
            weights=self.engine[sampled].exp(), engine_logprobs=self.engine[sampled], advantages=advantages[sampled],
            cu_seqlens=torch.arange(count + 1), old_logprobs=self.old[sampled],
            values={name: row.expand(count, -1) for name, row in rows.items()},
        )  # fmt: skip
        entropy = -(live.exp() * live).sum().expand(count)
        statistics = Statistics(live[sampled], entropy, candidate_logprobs=live[ids].expand(count, -1))
        total, metrics = PolicyLoss(config)(statistics, batch)
        return torch.autograd.grad(total, self.logits)[0], metrics

    def bound(self, k: int) -> float:
        """Returns the largest sum of probabilities, times two, of tokens outside of the k candidates."""
        rest = self.engine.argsort(descending=True)[k:]
        return 4 * float(self.engine[rest].exp().sum())


def config_of(objective: str, centering: int, correction: str = "none") -> LossConfig:
    arguments = OBJECTIVES.get(objective, {})
    return LossConfig(
        objective=objective.split(" with ")[0], objective_args=arguments, kl_coef=0.0, centering=centering,
        correction=CORRECTIONS[correction],
    )  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_centering_leaves_no_expected_gradient_of_a_constant_advantage(objective, correction):
    drifts = []
    for engine, steps, advantage in itertools.product(("quantised", "stale", "cut"), (False, True), (1.0, -1.0)):
        case, advantages = Case(engine, steps=steps), torch.full((VOCABULARY,), advantage, dtype=torch.float64)
        plain, _ = case.gradient(config_of(objective, 0, correction), advantages)
        whole, metrics = case.gradient(config_of(objective, VOCABULARY, correction), advantages)
        top, _ = case.gradient(config_of(objective, 20, correction), advantages)
        assert whole.norm() < 1e-6, (engine, steps, advantage)
        assert metrics["head_mass"] / torch.isfinite(case.engine).sum() == pytest.approx(1.0)
        # weights of the corrections and slopes of the objectives are at most 4 / 3 and 1.5 here
        assert top.abs().sum() <= 2 * case.bound(20) + 1e-6, (engine, steps, advantage)
        drifts.append(float(plain.norm()))
    assert max(drifts) > 0.02, "without centering there is a drift"


@pytest.mark.parametrize("engine", ["quantised", "stale", "cut"])
def test_centered_gradient_is_the_covariance_of_advantage_and_weighted_score(engine):
    """For any advantage, with REINFORCE and each correction: sum q (A - E A) w (e_v - p)."""
    advantages = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for correction in CORRECTIONS:
        case = Case(engine, steps=False)
        q, p, old = case.engine.exp(), case.logits.detach().softmax(-1), case.old.exp()
        ratio = torch.where(q > 0, old / q, 0.0)
        limits = CORRECTIONS[correction]
        weight = torch.ones_like(ratio)
        if limits is not None:
            inside = (ratio >= (limits.low or 0)) & (ratio <= limits.high)
            weight = {
                "truncate": ratio.clamp(limits.low, limits.high), "mask": inside * ratio, "drop": inside.double()
            }[limits.kind]  # fmt: skip
        scores = torch.eye(VOCABULARY, dtype=torch.float64) - p
        weighted = weight[:, None] * scores
        covariance = ((q * advantages)[:, None] * weighted).sum(0) - (q * advantages).sum() * (
            q[:, None] * weighted
        ).sum(0)
        found, _ = case.gradient(config_of("reinforce", VOCABULARY, correction), advantages)
        torch.testing.assert_close(-found, covariance, rtol=0, atol=1e-12)


def test_centering_changes_nothing_where_engine_and_trainer_agree():
    advantages = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    case = Case("same", steps=False)
    plain, _ = case.gradient(config_of("clipped", 0), advantages)
    centered, metrics = case.gradient(config_of("clipped", VOCABULARY), advantages)
    torch.testing.assert_close(centered, plain, rtol=0, atol=1e-12)
    assert float(metrics["drift_mass"]) < 1e-12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": "gspo"}, "combines the tokens of a rollout"),
        ({"objective": "gmpo"}, "combines the tokens of a rollout"),
        ({"objective": "vespo"}, "combines the tokens of a rollout"),
        ({"objective": "rover"}, "an objective that reads advantages, old, vocab_mean"),
        ({"objective": "distilled"}, "an objective that reads teacher_logprobs"),
        ({"objective": "distilled_top_k"}, "teacher_candidate_logprobs"),
        ({"objective": "test_centering:corrected"}, "combines the tokens of a rollout"),
        ({"objective": "test_centering:by_length"}, "combines the tokens of a rollout"),
        ({"objective": "kto"}, "an objective that reads"),
        ({"correction": CorrectionConfig(kind="mask", level="sequence", high=3.0)}, "correction.level = 'sequence'"),
        ({"correction": CorrectionConfig(kind="drop", level="geometric", high=1.1)}, "correction.level = 'geometric'"),
    ],
)
def test_centering_is_refused_where_another_token_has_no_loss_of_its_own(settings, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        PolicyLoss(LossConfig(centering=20, kl_coef=0.0, **settings))


def test_tokens_of_a_partner_are_not_centered():
    case, advantages = Case("stale", steps=False), torch.ones(VOCABULARY, dtype=torch.float64)
    config = config_of("reinforce", VOCABULARY)
    live = case.logits.log_softmax(-1)
    rows = {ENGINE_CANDIDATES: case.engine, OLD_CANDIDATES: case.old}
    batch = Batch(
        tokens=torch.arange(2), labels=torch.arange(2), mask=torch.tensor([True, False]),
        weights=torch.ones(2, dtype=torch.float64),
        engine_logprobs=case.engine[:2], advantages=advantages[:2], cu_seqlens=torch.tensor([0, 2]),
        old_logprobs=case.old[:2], values={name: row.expand(2, -1) for name, row in rows.items()},
    )  # fmt: skip
    entropy = -(live.exp() * live).sum().expand(2)
    candidates = live.expand(2, -1)
    total, _ = PolicyLoss(config)(Statistics(live[:2], entropy, candidate_logprobs=candidates), batch)
    [by_candidate] = torch.autograd.grad(total, candidates)
    assert by_candidate[0].abs().sum() > 0 and by_candidate[1].abs().sum() == 0


@pytest.mark.parametrize("centering", [0, 20])
def test_entropy_stays_where_rewards_ignore_the_tokens_and_the_engine_is_sharper(centering):
    """400 steps with the advantage 1 for every token, and an engine whose logits are 2 % larger."""
    case, advantages = Case("same", steps=False), torch.ones(VOCABULARY, dtype=torch.float64)
    entropies = []
    for _ in range(400):
        logprobs = case.logits.detach().log_softmax(-1)
        case.old, case.engine = logprobs, (1.02 * logprobs).log_softmax(-1)
        entropies.append(-float((logprobs.exp() * logprobs).sum()))
        gradient, _ = case.gradient(config_of("reinforce", centering), advantages)
        case.logits = (case.logits.detach() - 5.0 * gradient).requires_grad_()
    if centering:
        assert entropies == pytest.approx([entropies[0]] * 400, rel=0.02)
    else:
        assert entropies[-1] < 0.1 * entropies[0]
