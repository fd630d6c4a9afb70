"""Objectives, corrections and KL of the field's methods: against their formulas, one token at a time in float64 with
derivatives from pen and paper, and against what released code gave for the same numbers (tests/golden/losses.json)."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from losses_by_hand import (
    CORRECTIONS,
    METHODS,
    NAMES,
    batch_of,
    close,
    correction_of,
    draw,
    ppo,
    rollout,
    shares_by_hand,
    weighed,
    weight_by_hand,
)
from specs import spec_of

from megatron_rl.algorithms.corrections import correction_weights
from megatron_rl.algorithms.kl import kl_estimates
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.packed_batch import Batch, Statistics, pack
from megatron_rl.config.files import load
from megatron_rl.config.schema import CORRECTION_AHEAD, ConfigError, CorrectionConfig, LossConfig, TrainConfig
from megatron_rl.main import main
from megatron_rl.session import builders


def compare(method, correction, aggregation, *, seed, by_token):
    settings, formula = METHODS[method]
    config = LossConfig(**{"kl_coef": 0.0, "aggregation": aggregation, "correction": correction} | settings)
    batch, live, rollouts = draw(seed, by_token=by_token)
    batch, denominator = weighed(config, batch)
    total, sums = PolicyLoss(config)(live, batch)
    gradient = torch.autograd.grad(total / denominator, live.logprobs)[0]
    value, slopes, outside = 0.0, torch.zeros(len(gradient), dtype=torch.float64), 0
    for tokens, share in zip(rollouts, shares_by_hand(aggregation, rollouts), strict=True):
        corrected, out = weight_by_hand(correction, tokens)
        inside = method == "vespo"  # the correction is part of its formula and does not weigh the loss
        weights = [share * t.weight * (1.0 if inside else c) for t, c in zip(tokens, corrected, strict=True)]
        losses, by = (formula(corrected) if inside else formula)(tokens, weights)
        value += sum(w * loss for w, loss in zip(weights, losses, strict=True))
        slopes[[t.place for t in tokens]] = torch.tensor(by, dtype=torch.float64)
        outside += sum(out)
    close(total.detach() / denominator, value)
    close(gradient, slopes)
    assert torch.isfinite(gradient).all() and gradient[~batch.counted].eq(0).all()
    return sums, outside, batch


@pytest.mark.parametrize(
    ("correction", "aggregation", "by_token"),
    [("none", "token_mean", False), ("truncate by sequence", "sequence_mean", True)],
)
@pytest.mark.parametrize("method", METHODS)
def test_value_and_gradient_of_a_method_are_its_formulas(method, correction, aggregation, by_token):
    for seed in range(3):
        compare(method, correction_of(method, correction), aggregation, seed=seed, by_token=by_token)


@pytest.mark.parametrize(("method", "aggregation"), [("clipped", "token_mean"), ("gmpo", "sequence_mean")])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_weighs_by_its_formula_and_logs_the_share_outside(correction, method, aggregation):
    seen, tokens, config = 0, 0, CORRECTIONS[correction]
    for seed in range(6):
        sums, outside, batch = compare(method, config, aggregation, seed=seed, by_token=True)
        name = None if config is None or config.kind == "none" else config.kind
        names = {"truncate": "correction_truncated", "mask": "correction_masked", "drop": "correction_masked"}
        assert {n for n in sums if "correction" in n} == ({names[name]} if name else set())
        if name:
            assert sums[names[name]].item() == outside
        seen, tokens = seen + outside, tokens + int(batch.mask.sum())
    assert config is None or config.kind == "none" or 0 < seen < tokens, "the draw reaches both sides of the bounds"


def test_metrics_count_the_tokens_that_a_clip_decides():
    counts = dict.fromkeys(("clip_frac", "dual_clip_frac", "gmpo", "drop_frac"), 0)
    for seed in range(6):
        batch, live, rollouts = draw(seed)
        own = [t for tokens in rollouts for t in tokens if t.own]
        ratios = [(math.exp(t.new - t.old), t.advantage) for t in own]
        wanted = {
            "clip_frac": sum((u > 1.28 and a > 0) or (u < 0.8 and a < 0) for u, a in ratios),
            "dual_clip_frac": sum(u > 1.5 and a < 0 for u, a in ratios),
            "gmpo": sum(math.log(u) > 0.4 if a >= 0 else math.log(u) < -0.4 for u, a in ratios),
            "drop_frac": sum(math.exp(t.new) - math.exp(t.engine) < -0.2 for t in own),
        }
        found = {}
        for method in ("dual clip", "gmpo", "distilled"):
            found[method] = PolicyLoss(LossConfig(**{"kl_coef": 0.0} | METHODS[method][0]))(live, batch)[1]
        assert wanted == {
            "clip_frac": found["dual clip"]["clip_frac"].item(),
            "dual_clip_frac": found["dual clip"]["dual_clip_frac"].item(),
            "gmpo": found["gmpo"]["clip_frac"].item(),
            "drop_frac": found["distilled"]["drop_frac"].item(),
        }
        counts = {name: counts[name] + number for name, number in wanted.items()}
    assert all(counts.values())


@pytest.mark.parametrize("method", METHODS)
def test_sums_and_gradients_do_not_depend_on_how_rollouts_are_packed(method):
    settings = {"kl_coef": 0.1, "correction": correction_of(method, "mask by mean"), "kl_bias_correction": True}
    settings |= {"off_policy_mask": 0.1} | METHODS[method][0]
    loss = PolicyLoss(LossConfig(**settings))
    batch, live, _ = draw(11, by_token=True)
    whole, sums = loss(live, batch)
    parts = []
    for a, b in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        names = ("tokens", "labels", "mask", "weights", "engine_logprobs", "advantages", "old_logprobs")
        own = {name: getattr(batch, name)[a:b] for name in (*names, "reference_logprobs")}
        values = {name: value[a:b] for name, value in batch.values.items()}
        one = Batch(cu_seqlens=torch.tensor([0, b - a]), values=values, **own)
        parts.append(loss(Statistics(live.logprobs[a:b], live.entropy[a:b], live.vocab_mean[a:b]), one))
    close(sum(total for total, _ in parts).detach(), whole.detach())
    for got, want in zip(
        *(torch.autograd.grad(x, live.logprobs, retain_graph=True) for x in (sum(t for t, _ in parts), whole)),
        strict=True,
    ):
        close(got, want)
    for name, value in sums.items():
        close(sum(own[name] for _, own in parts), value.item())


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_with_nothing_to_train_gives_the_same_metrics_and_zeros(method):
    settings = {"kl_coef": 0.1, "correction": correction_of(method, "mask by sequence"), "kl_bias_correction": True}
    settings |= {"off_policy_mask": 0.1} | METHODS[method][0]
    loss = PolicyLoss(LossConfig(**settings))
    batch, live, _ = draw(1)
    dummy, logprobs = batch.dummy(4), torch.zeros(4, requires_grad=True)
    total, sums = loss(Statistics(logprobs, torch.zeros(4), torch.zeros(4)), dummy)
    total.backward()
    assert total.item() == 0 and not logprobs.grad.any() and not any(value.item() for value in sums.values())
    assert sums.keys() == loss(live, batch)[1].keys()


RELEASED = json.loads((Path(__file__).parents[2] / "golden/losses.json").read_text())


@pytest.mark.parametrize("name", RELEASED["cases"])
def test_released_code_gave_these_losses_and_gradients(name):
    case, rows = RELEASED["cases"][name], [dict(row) for row in RELEASED["rollouts"]]
    texts = [row["authors"] for row in rows]
    for number, first in case.get("partner", ()):
        texts[number] = texts[number][:first] + texts[number][first:].replace("P", "J")
    scale = case.get("scale", 1.0)
    values = {key: [row.get(key, [0.0] * len(row["old"])) for row in rows] for key in NAMES}
    values["new"] = [[o + scale * (n - o) for n, o in zip(row["new"], row["old"], strict=True)] for row in rows]
    batch, live = batch_of(texts, [0.0 if case.get("no_advantage") else row["advantage"] for row in rows], values)
    batch = replace(batch, weights=batch.counted.double())  # released code knows no partner's weight
    settings = {"kl_coef": 0.0} | case["config"]
    if "correction" in settings:
        settings["correction"] = CorrectionConfig(**settings["correction"])
    config = LossConfig(**settings)
    batch, denominator = weighed(config, batch)
    total, sums = PolicyLoss(config)(live, batch)
    gradient = torch.autograd.grad(total / denominator, live.logprobs)[0]
    wanted = torch.cat([torch.tensor([*row[1:], 0.0], dtype=torch.float64) for row in case["gradient"]])
    close(
        total.detach() / denominator, case["loss"], rtol=1e-6
    )  # weights are float32; released code adds 1e-8 to counts
    close(gradient, wanted, rtol=1e-6, atol=1e-9)
    for metric, share in case.get("metrics", {}).items():
        assert sums[metric].item() / batch.mask.sum().item() == pytest.approx(share, rel=1e-6)


def test_the_kl_clamp_holds_k3_and_its_gradient_without_nan():
    """verl and the release of RL Tango: clamp(exp(d) - d - 1, max=10). d = log q - log p = 5 gives 142 or 10."""
    p = torch.tensor([-5.1, -1.0, -300.0, -0.1], requires_grad=True)  # float32: exp(299) overflows
    q = torch.tensor([-0.1, -1.2, -1.0, -40.0])
    found = kl_estimates("k3", p, q, clamp=10.0)
    found.sum().backward()
    assert kl_estimates("k3", p, q)[0].item() == pytest.approx(math.exp(5) - 6, rel=1e-5)
    assert found.tolist() == pytest.approx([10.0, math.exp(-0.2) + 0.2 - 1, 10.0, 10.0])
    assert p.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-0.2), 0.0, 0.0])


def test_the_kl_clamp_is_in_the_loss_and_not_in_the_logged_kl():
    batch, live, rollouts = draw(3, width=3.0)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    clamped, sums = PolicyLoss(LossConfig(kl_coef=1.0, kl_clamp=10.0))(live, batch)
    tokens = [t for own in rollouts for t in own]
    each = [math.exp(t.reference - t.new) - (t.reference - t.new) - 1 for t in tokens]
    close(clamped.detach(), sum(t.weight * min(k, 10.0) for t, k in zip(tokens, each, strict=True)))
    close(sums["kl_ref"], sum(k for t, k in zip(tokens, each, strict=True) if t.own))
    assert max(each) > 10


def test_the_bias_corrected_kl_is_k3_times_the_live_ratio():
    """DeepSeek-V3.2 (arXiv 2512.02556); TRL's use_bias_correction_kl."""
    batch, live, rollouts = draw(5)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    total, sums = PolicyLoss(LossConfig(kl_coef=0.3, kl_bias_correction=True))(live, batch)
    value, slopes = 0.0, torch.zeros(len(batch.tokens), dtype=torch.float64)
    for t in [t for own in rollouts for t in own]:
        u, d = math.exp(t.new - t.old), t.reference - t.new
        value += 0.3 * t.weight * u * (math.exp(d) - d - 1)
        slopes[t.place] = 0.3 * t.weight * u * ((math.exp(d) - d - 1) + (1 - math.exp(d)))
    close(total.detach(), value)
    close(torch.autograd.grad(total, live.logprobs)[0], slopes)
    plain = PolicyLoss(LossConfig(kl_coef=0.3))(live, batch)
    close(sums["kl_ref"], plain[1]["kl_ref"].item())
    assert abs(total.item() - plain[0].item()) > 1e-3


@pytest.mark.parametrize(("corrected", "unbiased"), [(True, True), (False, False)])
def test_the_bias_corrected_kl_has_the_gradient_of_the_kl_over_an_older_policys_tokens(corrected, unbiased):
    """Every word of a small vocabulary is a rollout of one token, weighed by its probability under the old policy."""
    old, reference = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    logits = torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64, requires_grad=True)
    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)[0]
    loss, labels = PolicyLoss(LossConfig(kl_coef=1.0, kl_bias_correction=corrected)), [0, 2, 4]
    batch = pack([rollout("EP", i, 0.0) for i in range(3)])

    def placed(values):
        return torch.zeros(6, dtype=torch.float64).index_put((torch.tensor(labels),), values)

    batch = replace(
        batch,
        weights=placed(old.exp()),
        old_logprobs=placed(old),
        engine_logprobs=placed(old),
        reference_logprobs=placed(reference),
    )
    total, _ = loss(Statistics(placed(logits.log_softmax(0)), torch.zeros(6)), batch)
    found = torch.autograd.grad(total, logits)[0]
    assert torch.allclose(found, exact, rtol=1e-10) == unbiased


def test_the_off_policy_mask_leaves_out_rollouts_that_are_worse_and_far_from_their_sampler():
    """DeepSeek-V3.2 (arXiv 2512.02556); huggingface/trl f2cd577, grpo_trainer.py, get_off_policy_mask. KL stays."""
    seen = [0, 0]
    for seed in range(6):
        batch, live, rollouts = draw(seed, by_token=seed % 2 == 1)
        config = LossConfig(kl_coef=0.2, off_policy_mask=0.1)
        total, sums = PolicyLoss(config)(live, batch)
        value, masked = 0.0, 0
        for tokens in rollouts:
            moved = [t.engine - t.new for t in tokens if t.own]
            far = sum(moved) / max(1, len(moved)) > 0.1
            losses, _ = ppo()(tokens, [1.0] * len(tokens))
            for t, loss in zip(tokens, losses, strict=True):
                out = t.own and far and t.advantage < 0
                d = t.reference - t.new
                value += t.weight * ((0.0 if out else loss) + 0.2 * (math.exp(d) - d - 1))
                masked += out
        close(total.detach(), value)
        assert sums["off_policy_masked"].item() == masked
        seen = [seen[0] + masked, seen[1] + int(batch.mask.sum())]
    assert 0 < seen[0] < seen[1], "the draw reaches both sides of the bound"


@pytest.mark.parametrize("objective", ["sapo", "vespo"])
def test_ratios_beyond_any_exp_leave_no_nan_in_soft_objectives(objective):
    batch = replace(
        pack([rollout("EP", i, 0.0) for i in range(4)]),
        advantages=torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        old_logprobs=torch.tensor([-300.0, 0.0, -300.0, 0.0, -300.0, 0.0, -0.1, 0.0]),
    )
    live = torch.tensor([-0.1, 0.0, -0.1, 0.0, -0.1, 0.0, -300.0, 0.0], requires_grad=True)
    total, _ = PolicyLoss(LossConfig(objective=objective, kl_coef=0.0))(Statistics(live, torch.zeros(8)), batch)
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(live.grad).all() and live.grad.abs().max() < 1e-6


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask", "drop"])
def test_log_ratios_beyond_any_exp_leave_no_nan(kind, level):
    batch = pack([rollout("EPPP", 0, 0.0)])
    for far in (1e4, -1e4):
        config = CorrectionConfig(kind=kind, level=level, low=0.5)
        weights, _ = correction_weights(config, torch.tensor([far, 0.0, 0.0, 0.0]), batch)
        assert torch.isfinite(weights).all() and not torch.isnan(weights * 0.0).any()
        assert (weights[0] > 1 if far > 0 and kind != "drop" else weights[0] <= 1) and weights[3] == 1


def test_float32_stays_float32():
    batch, live, _ = draw(2)
    single = replace(
        batch,
        **{n: getattr(batch, n).float() for n in ("weights", "engine_logprobs", "advantages", "old_logprobs")},
        values={name: value.float() for name, value in batch.values.items()},
    )
    loose = Statistics(live.logprobs.float(), live.entropy.float(), live.vocab_mean.float())
    for method, (settings, _) in METHODS.items():
        corrected = {"correction": correction_of(method, "mask by sequence"), "off_policy_mask": 0.1}
        config = LossConfig(**{"kl_coef": 0.0} | corrected | settings)
        total, sums = PolicyLoss(config)(loose, single)
        assert total.dtype == torch.float32 and {s.dtype for s in sums.values()} == {torch.float32}
        assert total.item() == pytest.approx(PolicyLoss(config)(live, batch)[0].item(), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective_args": {"dual_clip": 0.5}}, "loss.objective_args.dual_clip = 0.5: give greater than 1"),
        ({"objective_args": {"dual_clip": "3"}}, "loss.objective_args.dual_clip = '3': give a valid number"),
        ({"objective_args": {"ratio_bound": 1.0}}, "loss.objective_args.ratio_bound = 1.0"),
        ({"objective": "gmpo", "objective_args": {"clip_low": -0.1}}, "loss.objective_args.clip_low = -0.1"),
        ({"objective": "cispo", "objective_args": {"cap": 0.0}}, "loss.objective_args.cap = 0.0"),
        ({"objective": "sapo", "objective_args": {"tau_neg": 0.0}}, "loss.objective_args.tau_neg = 0.0"),
        ({"objective": "vespo", "objective_args": {"lambda_pos": 0.0}}, "loss.objective_args.lambda_pos = 0.0"),
        (
            {"objective": "vespo", "correction": CORRECTIONS["mask by sequence"]},
            "loss.correction.level = 'sequence' with loss.objective = 'vespo'",
        ),
        ({"objective": "cispo", "objective_args": {"cap": math.inf}}, "loss.objective_args.cap = inf"),
        ({"objective": "cispo", "objective_args": {"cap": True}}, "loss.objective_args.cap = True"),
        ({"objective": "distilled", "objective_args": {"max_fall": 0.0}}, "loss.objective_args.max_fall = 0.0"),
        ({"objective": "reinforce", "objective_args": {"tau": -1.0}}, "loss.objective_args.tau = -1.0"),
        ({"objective": "reinforce", "objective_args": {"clip_low": 0.1}}, "reinforce takes tau"),
        ({"objective": "gspo", "clip_high": 0.28}, "give them in loss.objective_args"),
        ({"kl": "k2", "kl_clamp": 10.0}, "loss.kl_clamp = 10.0 with loss.kl = 'k2'"),
    ],
)
def test_settings_of_an_objective_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        PolicyLoss(LossConfig(**settings))


@pytest.fixture
def base(tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text(
        "roles: {generator: {model: {path: org/model}}}\ndata: {path: problems.jsonl}\n"
        "recipe: {target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 3}}\n"
    )
    return file


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("correction={kind: mask}", "correction.kind = 'mask' without bounds"),
        ("correction={level: sequence, high: 2.0}", "correction.kind: missing"),
        ("correction={kind: none, level: sequence}", "correction.kind = 'none' with level = 'sequence'"),
        ("correction={kind: none, high: 2.0}", "leave these out"),
        ("correction={kind: mask, low: -0.1}", "correction.low = -0.1: give a value greater than or equal to 0"),
        ("correction={kind: mask, low: 0.5, high: 0.4}", "correction.low = 0.5, high = 0.4"),
        ("correction={kind: drop, low: 1.2, high: 3.0}", "must lie within the bounds"),
        ("correction={kind: clip, high: 3.0}", "choose 'none', 'truncate', 'mask' or 'drop'"),
        ("correction={kind: mask, level: word, high: 3.0}", "choose 'token', 'sequence' or 'geometric'"),
        ("off_policy_mask=0.0", "off_policy_mask = 0.0: give a value greater than 0"),
        ("tis_cap=2.0", "unknown key"),
    ],
)
def test_corrections_that_cannot_be_are_refused_where_the_config_is_read(base, override, said):
    with pytest.raises(ConfigError) as error:
        load(TrainConfig, [base], [f"roles.generator.loss.{override}"])
    assert said in str(error.value) and "roles.generator.loss." in str(error.value)


def test_check_refuses_an_objective_that_cannot_be(base, capsys):
    assert main(["check", str(base), "--elsewhere"]) == 0
    assert main(["check", str(base), "--elsewhere", "roles.generator.loss.objective_args.dual_clip=0.5"]) == 2
    assert "roles.generator: loss.objective_args.dual_clip = 0.5: give greater than 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("staleness", "given", "wanted"),
    [
        (0, None, None),
        (2, None, CORRECTION_AHEAD),
        (2, "{kind: none}", CorrectionConfig(kind="none")),
        (2, "{kind: mask, low: 0.5, high: 5.0}", CorrectionConfig(kind="mask", low=0.5, high=5.0)),
    ],
)
def test_rollouts_ahead_of_training_are_corrected_unless_the_role_says_how(base, staleness, given, wanted):
    overrides = ["engine.kind=vllm", f"rollouts.max_staleness={staleness}"]
    overrides += [f"roles.generator.loss.correction={given}"] if given else []
    config = load(TrainConfig, [base], overrides)
    spec = spec_of(config)
    made = builders.trainee(spec.roles["generator"], spec.run, policy=None)
    assert made.loss.config.correction == wanted
