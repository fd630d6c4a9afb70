"""Preferences: pairs stay together in steps and micro-batches, rows in TRL's formats, and KTO's estimate of the KL."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import specs
import torch
from fake_policy import TablePolicy, without_speed
from one_process import OneProcess
from toys import characters

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.data_parallel_split import split, split_over_replicas
from megatron_rl.batches.micro_batches import Cost, Prefixes, micro_batches
from megatron_rl.batches.packed_batch import Statistics, pack
from megatron_rl.batches.replica_batch import Work
from megatron_rl.commands import sft
from megatron_rl.commands.check_data import data_lines
from megatron_rl.commands.sft import _with_kl
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, LossConfig, SftConfig, SftData
from megatron_rl.data.rows import DataError
from megatron_rl.data.sft import Conversation, Preference, TextPair, mismatched, read_samples, sft_rollouts
from megatron_rl.training.update import Trainee, evaluate, update
from megatron_rl.types import Author, Rollout, spans_of

VOCAB = 12
DPO = LossConfig(objective="dpo", kl_coef=0.0)


def pair_rollouts(count, seed=0, shared=True):
    """Pairs whose responses have different lengths; the prompts are of 1 to 4 tokens."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 5))
        for _ in range(2):
            own = rng.integers(0, VOCAB, rng.integers(1, 6))
            tokens = np.concatenate([prompt if shared else prompt[::-1], own])
            out.append(
                Rollout(
                    role="model", group=str(number), tokens=tokens, logprobs=np.zeros(len(tokens)),
                    spans=spans_of((len(prompt), Author.ENVIRONMENT, -1), (len(own), Author.POLICY, 0)),
                )
            )  # fmt: skip
    return out


def test_preferences_pairs_are_whole_adjacent_and_in_order_whatever_the_budget_and_the_multiple():
    rng = random.Random(1)
    for _ in range(200):
        count, replicas, multiple = rng.randint(1, 20), rng.randint(1, 4), rng.randint(1, 3)
        prompts = [rng.randint(1, 30) for _ in range(count)]
        lengths = [prompts[i // 2] + rng.randint(1, 30) for i in range(2 * count)]
        groups, budget = np.arange(2 * count) // 2, rng.randint(120, 300)
        prefixes = Prefixes(numbers=groups, lengths=np.repeat(prompts, 2)) if rng.random() < 0.5 else None
        shares = micro_batches(
            lengths, max_tokens=budget, replicas=replicas, multiple=multiple, cost=Cost(50), prefixes=prefixes,
            groups=groups,
        ).sequences  # fmt: skip
        assert len(shares) == replicas and len({len(share) for share in shares}) == 1
        assert len(shares[0]) % multiple == 0
        assert sorted(i for share in shares for micro in share for i in micro) == list(range(2 * count))
        for micro in (micro for share in shares for micro in share):
            assert micro[1::2] == [i + 1 for i in micro[0::2]] and all(i % 2 == 0 for i in micro[0::2])
            tokens = sum(lengths[i] for i in micro) - (
                0 if prefixes is None else sum(prompts[i // 2] for i in micro[::2])
            )
            assert tokens <= budget


def test_preferences_costs_are_balanced_over_replicas():
    lengths = [100] * 32
    shares = micro_batches(lengths, max_tokens=400, replicas=4, cost=Cost(1000), groups=np.arange(32) // 2)
    assert shares.replica_imbalance == 0 and shares.micro_batch_imbalance == 0


def test_preferences_a_pair_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="70 tokens of rollouts that are compared .* micro_batch_tokens = 60"):
        micro_batches([30, 40], max_tokens=60, replicas=1, groups=np.array([0, 0]))
    assert micro_batches([30, 40], max_tokens=60, replicas=1).sequences == [[[1], [0]]]


def test_preferences_steps_have_whole_pairs_from_rollouts_in_any_order():
    made = pair_rollouts(7)
    mixed = [made[i] for i in (0, 2, 4, 6, 8, 10, 12, 1, 3, 5, 7, 9, 11, 13)]
    shares = split_over_replicas(mixed, TablePolicy(VOCAB), loss=PolicyLoss(DPO), samples_per_step=5)
    work = Work.over(shares.buffer(0), shares.outline, 0)
    assert [step.denominator for step in work.steps] == [4, 4, 6]
    for micro in work.micros():
        batch = work.batch(micro)
        tokens = [row.tolist() for row in np.split(batch.tokens.numpy(), batch.cu_seqlens[1:-1].tolist())]
        wanted = [r.tokens.tolist() for r in made]
        places = [wanted.index(row) for row in tokens]
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(places[::2], places[1::2], strict=True))
    assert split(14, 3, unit=2) == [range(0, 2), range(2, 4), range(4, 8), range(8, 10), range(10, 14)]
    with pytest.raises(ValueError, match="group '0' has 3 rollouts, and the loss compares two"):
        split_over_replicas([*made, made[0]], TablePolicy(VOCAB), loss=PolicyLoss(DPO))


@pytest.mark.parametrize("objective", ["dpo", "dpo_norm", "ipo", "simpo"])
def test_preferences_micro_batches_do_not_change_an_update(objective):
    """The last micro-batches of seven pairs in budgets of 24 tokens differ from one batch of all."""
    found = []
    for budget in (1 << 20, 24):
        policy = TablePolicy(VOCAB, micro_batch_tokens=budget)
        trainee = Trainee(policy=policy, loss=PolicyLoss(LossConfig(objective=objective, kl_coef=0.0)))
        metrics = [without_speed(update(OneProcess(), trainee, pair_rollouts(7))) for _ in range(3)]
        found.append((metrics, policy.table.detach().clone()))
    (whole, table), (parts, other) = found
    assert torch.allclose(table, other, atol=1e-6)
    for one, two in zip(whole, parts, strict=True):
        assert {name: two[name] for name in one if "/" in name or name == "loss"} == pytest.approx(
            {name: value for name, value in one.items() if "/" in name or name == "loss"}, rel=1e-5, abs=1e-6
        )
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"}
    assert names <= whole[0].keys() and not any(name.startswith("count/") for name in whole[0])
    assert whole[-1]["loss"] < whole[0]["loss"] and whole[-1]["rewards/margins"] > whole[0]["rewards/margins"]


def test_preferences_a_batch_without_rollouts_has_no_loss_and_counts_nothing():
    pair_batch = replace(pack([replace(r, advantages=0.0) for r in pair_rollouts(1)]), reference_logprobs=None)
    batch = pair_batch.dummy(4)
    live = torch.zeros(4, requires_grad=True)
    for objective in ("dpo", "ipo", "simpo", "kto"):
        loss = PolicyLoss(LossConfig(objective=objective, kl_coef=0.0))
        total, sums = loss(Statistics(live, torch.zeros(4)), replace(batch, values={"kl": torch.zeros(4)}))
        total.backward()
        assert total.item() == 0 and not live.grad.any()
        assert all(value.item() == 0 for name, value in sums.items() if "/" in name)


def test_preferences_losses_on_rewards_are_those_of_the_formulas_in_float64():
    """A-LoL as its release computes it, and reward-weighted regression, one response after the other."""
    rewards = [0.5, -1.0, 2.0, 0.0]
    rollouts = [replace(r, advantages=reward) for r, reward in zip(pair_rollouts(2), rewards, strict=True)]
    batch, draw = pack(rollouts), torch.Generator().manual_seed(3)
    live, reference = (
        torch.where(batch.mask, -2 * torch.rand(len(batch.tokens), generator=draw, dtype=torch.float64), 0)
        for _ in range(2)
    )
    live.requires_grad_()
    ends = batch.cu_seqlens.tolist()
    wanted = {"a_lol": 0.0, "rwr": 0.0}
    for reward, start, end in zip(rewards, ends, ends[1:], strict=False):
        own = live[start:end].sum()
        ratio = min(max((own - reference[start:end].sum()).exp().item(), 0.75), 1.25)
        wanted["a_lol"] = wanted["a_lol"] - max(reward, 0.0) * ratio * own / len(rewards)
        wanted["rwr"] = wanted["rwr"] - float(np.exp(reward / 0.5)) * own / len(rewards)
    for name, args in (("a_lol", {"clip": 0.25}), ("rwr", {"beta": 0.5})):
        loss = PolicyLoss(LossConfig(objective=name, objective_args=args, kl_coef=0.0))
        counts = batch.sequence_sums(batch.mask.double()).numpy()
        weights, denominator = loss.aggregate(counts, np.arange(len(rewards)))
        weighted = replace(
            batch, weights=batch.weights * batch.spread(torch.from_numpy(weights)), reference_logprobs=reference
        )
        total = loss(Statistics(live, torch.zeros_like(live)), weighted)[0] / denominator
        assert total.item() == pytest.approx(wanted[name].item(), rel=1e-6)
        found, right = (torch.autograd.grad(value, live, retain_graph=True)[0] for value in (total, wanted[name]))
        assert torch.allclose(found, right * batch.mask, rtol=1e-6, atol=1e-9)


def kto_rollouts(labels):
    made = pair_rollouts(len(labels))[::2]
    return [replace(r, advantages=1.0 if label else -1.0) for r, label in zip(made, labels, strict=True)]


def test_preferences_kto_reads_the_kl_of_mismatched_responses_and_learns():
    policy, labels = TablePolicy(VOCAB, lr=0.1), [True, False, True, True, False]
    rollouts = kto_rollouts(labels)
    others = mismatched(rollouts, max_tokens=8)
    nll = PolicyLoss(LossConfig(objective="nll", kl_coef=0.0))
    update(OneProcess(), Trainee(policy=policy, loss=nll), others)  # away from the reference, so that the KL is not 0
    for number, other in enumerate(others):
        own, source = rollouts[number], rollouts[number - 1]
        wanted = [*own.tokens[: own.start], *source.tokens[source.start :]][:8]
        assert other.tokens.tolist() == wanted and other.start == own.start
    gaps = []
    for other in others:
        logits = (policy.table.detach().double().log_softmax(-1), policy._start.double().log_softmax(-1))
        tokens = other.tokens.tolist()
        rows = [
            (tokens[max(i - 1, 0)] * VOCAB + tokens[i], tokens[i + 1]) for i in range(other.start - 1, len(tokens) - 1)
        ]
        gaps.append(sum((logits[0][row][label] - logits[1][row][label]).item() for row, label in rows))
    kl = max(0.0, float(np.mean(gaps)))
    ready = _with_kl(OneProcess(), policy, rollouts, [], 8)
    assert kl > 0 and all((r.values["kl"] == pytest.approx(kl, rel=1e-5)) for r in ready)
    trainee = Trainee(policy=policy, loss=PolicyLoss(LossConfig(objective="kto", kl_coef=0.0)))
    first = update(OneProcess(), trainee, ready)
    assert first["kl"] == pytest.approx(kl, rel=1e-5)
    for _ in range(10):
        update(OneProcess(), trainee, _with_kl(OneProcess(), policy, rollouts, [], 8))
    last = evaluate(OneProcess(), trainee, _with_kl(OneProcess(), policy, rollouts, [], 8))
    assert last["rewards/chosen"] - last["rewards/rejected"] > first["rewards/chosen"] - first["rewards/rejected"]
    alone = update(OneProcess(), trainee, _with_kl(OneProcess(), policy, kto_rollouts([True, True]), [], 8))
    assert "rewards/chosen" in alone and "rewards/rejected" not in alone


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04."])
def test_faults_damaged_log_probs_of_the_reference_are_computed_again(tmp_path, content, caplog):
    made, file = pair_rollouts(2, 0), tmp_path / "reference_logprobs.npz"
    file.write_bytes(content)
    sft.with_reference(OneProcess(), TablePolicy(VOCAB), ([made], []), file, inputs="model a")
    assert "is damaged, and is computed again" in caplog.text and made[0].values["reference_logprobs"][-1] < 0
    with np.load(file) as kept:
        assert len(kept["logprobs"]) == sum(len(one.tokens) for one in made)


def test_preferences_log_probs_of_the_reference_are_computed_once_and_read_by_a_later_start(tmp_path, monkeypatch):
    def rows(seed=0):
        made = pair_rollouts(7, seed)
        return [made[i : i + 2] for i in range(0, 8, 2)], [made[i : i + 2] for i in range(8, 14, 2)]

    monkeypatch.setattr(sft, "REFERENCE_CHUNK", 5)
    policy, first, second = TablePolicy(VOCAB), rows(), rows()
    file, loss = tmp_path / "reference_logprobs.npz", PolicyLoss(DPO, given_reference=True)
    sft.with_reference(OneProcess(), policy, first, file, inputs="model a")
    trained = [one for row in first[0] for one in row]
    plain, given = TablePolicy(VOCAB), TablePolicy(VOCAB)
    for step in range(2):
        wanted = update(
            OneProcess(), Trainee(policy=plain, loss=PolicyLoss(DPO)), [r for row in rows()[0] for r in row]
        )
        found = update(OneProcess(), Trainee(policy=given, loss=loss), trained)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6), step
    assert torch.allclose(plain.table, given.table, atol=1e-7)

    with monkeypatch.context() as patch:
        patch.setattr(TablePolicy, "statistics", None)  # would fail if it were called
        sft.with_reference(OneProcess(), policy, second, file, inputs="model a")
    for one, two in zip(sum(first[0] + first[1], []), sum(second[0] + second[1], []), strict=True):
        assert one.values["reference_logprobs"].tolist() == two.values["reference_logprobs"].tolist()
        assert not one.values["reference_logprobs"][: one.start].any() and one.values["reference_logprobs"][-1] < 0
    before, others = file.read_bytes(), rows(seed=1)
    sft.with_reference(OneProcess(), policy, others, file, inputs="model a")  # other rows: the file is written anew
    assert (after := file.read_bytes()) != before
    sft.with_reference(OneProcess(), policy, others, file, inputs="model b")  # another model, too
    assert file.read_bytes() != after


def test_preferences_mismatched_responses_of_pairs_are_those_of_other_prompts():
    rollouts = pair_rollouts(4)
    others, places = mismatched(rollouts, 100), [0, 2, 4, 6, 1, 3, 5, 7]
    assert [other.group for other in others] == [rollouts[i].group for i in places]
    for number, other in enumerate(others):
        source = rollouts[places[number - 1]]
        assert source.group != other.group
        assert other.tokens[other.start :].tolist() == source.tokens[source.start :].tolist()


def test_faults_a_single_row_is_combined_with_responses_of_another_row():
    """KTO's KL term of a step of one row was that of the row's own response."""
    rollouts, other = pair_rollouts(1), [replace(r, group="0") for r in pair_rollouts(3)[4:]]
    made = mismatched(rollouts, 100, other_row=other)
    assert [m.tokens.tolist() for m in made] == [
        [*r.tokens[: r.start], *o.tokens[o.start :]] for r, o in zip(rollouts, other, strict=True)
    ]
    assert mismatched(pair_rollouts(2), 100, other_row=other)[0].tokens.tolist() == (
        mismatched(pair_rollouts(2), 100)[0].tokens.tolist()
    )


CHAT = [{"role": "user", "content": "hi"}]
GOOD, BAD = [{"role": "assistant", "content": "hello"}], [{"role": "assistant", "content": "go"}]


def samples(tmp_path, *rows, kind="pair", **settings):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return read_samples(SftData(train=str(file), **settings), kind=kind)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "ab", "chosen": "c", "rejected": "d"}, "ab", "c", "d"),
        (
            {"chosen": "a b c", "rejected": "a b d"},
            "a b",
            " c",
            " d",
        ),  # TRL's documentation: the space is the response's
        ({"chosen": "H: x\n\nA: yes", "rejected": "H: x\n\nA: no"}, "H: x\n\nA:", " yes", " no"),
        ({"question": "ab", "chosen": "c", "rejected": "d"}, "ab", "c", "d"),
    ],
)
def test_preferences_pairs_of_texts_are_read_as_trl_reads_them(tmp_path, row, prompt, chosen, rejected):
    settings = {"prompt_field": "question"} if "question" in row else {}
    [found] = samples(tmp_path, row, **settings)
    assert found == Preference(TextPair(prompt=prompt, response=chosen), TextPair(prompt=prompt, response=rejected))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CHAT, "chosen": GOOD, "rejected": BAD},
        {"chosen": CHAT + GOOD, "rejected": CHAT + BAD},
        {"prompt": "hi", "chosen": CHAT + GOOD, "rejected": CHAT + BAD},
    ],
)
def test_preferences_pairs_of_conversations_are_read_as_trl_reads_them(tmp_path, row):
    [found] = samples(tmp_path, row)
    assert (found.chosen.messages, found.rejected.messages) == (CHAT + GOOD, CHAT + BAD)
    assert found.chosen.first == found.rejected.first == 1


@pytest.mark.parametrize(
    ("row", "kind", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "pair", "no rejected; the row has prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "pair", "chosen and rejected are equal"),
        ({"chosen": "b", "rejected": "c"}, "pair", "the prompt is empty"),
        ({"chosen": GOOD, "rejected": BAD}, "pair", "begin with different messages"),
        ({"prompt": "a", "completion": "b"}, "scored", "label is None and reward is None: give `label`, true or false"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "scored", "label is 'yes'"),
        ({"prompt": "a", "completion": "b", "reward": float("inf")}, "scored", "reward is inf"),
    ],
)
def test_preferences_rows_that_are_no_preferences_are_refused(tmp_path, row, kind, says):
    with pytest.raises(DataError, match=says):
        samples(tmp_path, row, kind=kind)


def test_preferences_labels_rewards_and_pairs_become_advantages(tmp_path):
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "b", "label": False},
        {"prompt": "a", "completion": "b", "reward": 2.5},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    found = samples(tmp_path, *rows, kind="scored")
    rollouts = sft_rollouts(found, characters(), append_eos=True, max_tokens=9)
    assert [r.advantages for r in rollouts] == [1.0, -1.0, 2.5, 1.0, -1.0]
    assert [r.group for r in rollouts] == ["0", "1", "2", "3", "3"]


def test_preferences_a_pair_becomes_two_rollouts_of_one_prompt_or_none(tmp_path):
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "defg"}, {"prompt": "ab", "chosen": "cc", "rejected": "d"}]
    found = samples(tmp_path, *rows)
    kept = sft_rollouts(found, characters(), append_eos=True, max_tokens=5, max_bad_share=0.5)
    tokenizer = characters()
    assert [tokenizer.decode(r.tokens[:-1]) for r in kept] == ["abcc", "abd"]
    assert all(r.tokens[-1] == tokenizer.eos_token_id and r.start == 2 and r.group == "1" for r in kept)
    assert isinstance(found[0].chosen, TextPair) and not isinstance(found[0].chosen, Conversation)


def config_of(tmp_path, row, *overrides):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    settings = [f"data.train={tmp_path}/rows.jsonl", "data.max_tokens=100", "micro_batch_tokens=200"]
    return load(SftConfig, [], ["model.path=org/model", *settings, *overrides])


@pytest.mark.parametrize(
    ("objective", "row", "says"),
    [
        ("nll", {"prompt": "a", "response": "b"}, "1 samples: pairs of texts"),
        ("simpo", {"chosen": "a b", "rejected": "a c"}, "1 samples: pairs of texts, each with a chosen and a rejected"),
        (
            "dpo",
            {"chosen": CHAT + GOOD, "rejected": CHAT + BAD},
            "1 samples: conversations, .* turns, each with a chosen",
        ),
        ("kto", {"prompt": "a", "completion": "b", "label": False}, "1 samples: pairs of texts, with labels"),
    ],
)
def test_preferences_check_says_what_the_rows_hold(tmp_path, objective, row, says):
    spec = specs.spec_of(config_of(tmp_path, row, f"loss.objective={objective}"))
    [line] = data_lines(spec, deep=False)
    assert re.search(says, line), line


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["loss.objective=dpo", "micro_batch_tokens=199"],
            "micro_batch_tokens = 199 is less than twice data.max_tokens",
        ),
        (["loss.objective=simpo", "loss.precompute_ref_log_probs=true"], "'simpo', which reads no reference"),
        (["loss.objective=distilled"], "needs teacher_logprobs, which rows of data do not have"),
        (["loss.objective=dpo", "loss.objective_args.beta=0"], "loss.objective_args.beta = 0: give greater than 0"),
        (["loss.objective=dpoo"], "loss.objective = 'dpoo': it is one of"),
        (["loss.objective=dpo", "shared_prefixes=true", "layout.cp=2"], "shared_prefixes = true with layout.cp = 2"),
    ],
)
def test_preferences_settings_that_cannot_be_trained_with_are_refused(tmp_path, overrides, says):
    config = config_of(tmp_path, {"chosen": "a b", "rejected": "a c"}, *overrides)
    with pytest.raises(ConfigError, match=re.escape(says)):
        specs.check(config, 2, to_come=True)
