"""Two roles in one world, checkpoints across layouts, sleep; and how a batch is cut into micro-batches."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import make_model

from megatron_rl.batches.micro_batches import Cost, micro_batches
from megatron_rl.models.sizes import Sizes


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("actor")
    make_model(directory / "model", "qwen2", vocab_size=97)
    make_model(directory / "tied", "qwen2", vocab_size=97, hidden_size=60, head_dim=16, tie_word_embeddings=True)
    make_model(directory / "large", "qwen2", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    make_model(directory / "experts", "qwen2_moe", vocab_size=97)
    make_model(directory / "three_experts", "qwen3_moe", num_experts=3)
    make_model(directory / "one_expert", "mixtral", num_experts_per_tok=1)
    return run_ranks(
        Path(__file__).parents[1] / "helpers" / "actor_worker.py", 2, directory / "ranks", str(directory / "model")
    )


@pytest.mark.multi
def test_two_roles_with_different_layouts_do_not_disturb_each_other(answers):
    for answer in answers:
        assert answer["roles"]["a"] == 0.0 and answer["roles"]["b"] == 0.0
        assert answer["roles"]["vpp"] < 2e-6
        assert answer["roles"]["layouts"] < 1e-4  # tp 2 and pp 2 after three Adam steps of 1e-3, which magnify rounding


@pytest.mark.multi
def test_resume_of_the_actor_is_exact_and_crosses_layouts(answers):
    for answer in answers:
        found = answer["checkpoints"]
        assert found["same/loaded"] == 0.0 and found["same/after"] == 0.0
        for name in ("dp_to_tp", "tp_to_dp", "pp_to_cp"):
            assert found[f"{name}/background"] == 0.0
            assert found[f"{name}/loaded"] == 0.0 and found[f"{name}/read"] == 0.0
            assert found[f"{name}/lr"] == 0.0
            assert found[f"{name}/after"] < 1e-5
        built, resumed, staged = found["settings"]
        assert resumed == staged == built, "a checkpoint or an earlier stage overwrites no setting of the optimizer"
        [*_, decayed], clips = built
        assert [decayed[n] for n in ("lr", "weight_decay", "betas", "eps")] == [3e-4, 0.3, [0.5, 0.6], 1e-4]
        assert clips == [0.25]


@pytest.mark.multi
def test_a_save_that_overtakes_another_takes_no_report_of_it(answers):
    """Core asked one queue for the reports of all saves: the metadata of two roles' checkpoints was exchanged where the
    second role's files were there first, and neither could be read."""
    assert [answer["overtaken"].pop("reports") for answer in answers] == [1, 1], "the second's, and not the first's"
    for answer in answers:
        assert answer["overtaken"] == {"first": 0.0, "second": 0.0}


@pytest.mark.multi
def test_resume_of_a_tied_model_in_stages_whose_embedding_needs_padding_is_exact(answers):
    """Core saves its buckets without padding, and cuts parameters out of them as if the padding were there."""
    for answer in answers:
        found = answer["tied"]
        assert found["same/loaded"] == 0.0 and found["same/after"] == 0.0
        assert found["pp_to_tp/loaded"] == 0.0 and found["pp_to_tp/after"] < 1e-5


@pytest.mark.multi
def test_resume_of_a_model_with_experts_crosses_expert_layouts(answers):
    for answer in answers:
        found = answer["experts"]["checkpoints"]
        assert found["same/loaded"] == 0.0 and found["same/after"] == 0.0
        for name in ("dp_to_ep", "ep_to_tp", "etp_to_pp"):
            assert found[f"{name}/loaded"] == 0.0 and found[f"{name}/read"] == 0.0
            assert found[f"{name}/lr"] == 0.0
            assert found[f"{name}/after"] < 1e-5
        built, resumed, staged = found["settings"]
        assert resumed == staged == built
        assert [group["weight_decay"] for group in built[0]] == [0.0, 0.3, 0.3], "dense parameters, and experts"
        assert built[1] == [0.25] * 2


@pytest.mark.multi
def test_a_checkpoint_is_written_from_where_its_state_lies(answers):
    """The rows that two ranks share are all that is copied; the first of two ranks took 29 bytes a parameter."""
    for answer in answers:
        assert answer["checkpoint_memory"]["bytes"] < 0.5


@pytest.mark.multi
def test_candidates_that_are_no_tokens_of_the_model_are_refused(answers):
    for answer in answers:
        assert "values 'candidates' hold tokens 0 to 97; " in answer["experts"]["refusals"]["vocabulary"]
        assert "has 97 tokens: the teacher, or whoever names them" in answer["experts"]["refusals"]["vocabulary"]


@pytest.mark.multi
def test_what_experts_cannot_do_is_refused_with_the_cure(answers):
    for answer in answers:
        says = answer["experts"]["refusals"]
        assert "has no experts: set layout.ep = 2 to 1" in says["dense"]
        assert "set layout.sequence_parallel to true" in says["no_sequence_parallel"]
        assert "num_experts = 3 of " in says["uneven"]
        assert "num_experts_per_tok = 1 with renormalised probabilities (mixtral)" in says["one_expert"]


@pytest.mark.multi
def test_experts_that_get_no_token_change_nothing(answers):
    for answer in answers:
        assert answer["experts"]["few"] < 1e-5


@pytest.mark.multi
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_sleep_frees_gradients_and_changes_nothing(answers, model):
    for answer in answers:
        found = answer["sleep"] if model == "dense" else answer["experts"]["sleep"]
        assert found["held"] > 0 and found["asleep"] == 0
        assert found["away"] == [False, False, True, True, True, True], "weights leave where they are told to"
        assert found["distance"] == found["present"] == 0.0
        assert found["frozen"] < 2e-6


@pytest.mark.multi
def test_vocabulary_parallel_logprobs_are_log_softmax(answers):
    for answer in answers:
        assert len(answer["head"]) == 36
        for name, error in answer["head"].items():
            assert error < 1e-4, name  # sums over 150 rows in float32


@pytest.mark.multi
def test_a_rank_holds_the_rollouts_of_its_own_replica_and_no_others(answers):
    first, second = (answer["holdings"] for answer in answers)
    assert sorted(first["dp"]["numbers"] + second["dp"]["numbers"]) == list(range(8))
    assert 0 < len(first["dp"]["numbers"]) < 8
    for name in ("tp", "pp", "cp"):
        assert first[name]["numbers"] == second[name]["numbers"] == list(range(8))
    assert all(found["tokens"] for answer in (first, second) for found in answer.values())
    assert (first["pp"]["logprobs"], second["pp"]["logprobs"]) == ([], [True]), "log-probs stay on the last stage"
    assert all(answer[name]["logprobs"] == [True] for answer in (first, second) for name in ("dp", "tp", "cp"))


def test_micro_batches_of_thousands_of_sequences_are_cut_in_no_time():
    """Sequences of which no two fit together, and many of which most bins are full for."""
    for lengths in ([5000] * 4000, [int(n) for n in np.random.default_rng(0).integers(1, 8000, 8000)]):
        start = time.process_time()
        shares = micro_batches(lengths, max_tokens=8192, replicas=8, cost=Cost(20000))
        assert time.process_time() - start < 2.0
        assert sorted(i for share in shares.sequences for micro in share for i in micro) == list(range(len(lengths)))


def test_micro_batches_cover_every_sequence_once_within_the_budget():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 80))]
        replicas, budget = rng.randint(1, 5), rng.randint(60, 200)
        shares = micro_batches(
            lengths, max_tokens=budget, replicas=replicas, cost=Cost(rng.choice([0, 10, 1000]))
        ).sequences
        assert len({len(share) for share in shares}) == 1 and len(shares) == replicas
        assert sorted(i for share in shares for micro in share for i in micro) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in micro) <= budget for share in shares for micro in share)


def test_micro_batches_come_in_the_multiple_that_a_schedule_needs():
    rng = random.Random(2)
    for _ in range(100):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))]
        shares = micro_batches(lengths, max_tokens=60, replicas=2, multiple=4).sequences
        assert len(shares[0]) == len(shares[1]) and len(shares[0]) % 4 == 0
        assert sorted(i for share in shares for micro in share for i in micro) == list(range(len(lengths)))


def test_micro_batches_are_balanced_over_replicas():
    rng = random.Random(1)
    lengths = [int(rng.lognormvariate(5, 0.8)) + 1 for _ in range(512)]
    shares = micro_batches(lengths, max_tokens=4096, replicas=8).sequences
    loads = [sum(lengths[i] for micro in share for i in micro) for share in shares]
    assert max(loads) < 1.02 * min(loads)


def test_micro_batches_are_balanced_by_what_attention_costs_too():
    """There are long sequences and many short ones. With equal tokens one replica would have all the attention."""
    lengths, cost = [4000] * 4 + [250] * 64, Cost(balance=500)

    def spread(by):
        shares = micro_batches(lengths, max_tokens=16384, replicas=4, cost=by)
        loads = [sum(cost.of(lengths[i]) for micro in share for i in micro) for share in shares.sequences]
        return max(loads) * 4 / sum(loads) - 1, shares

    uneven, shares = spread(cost)
    assert uneven == pytest.approx(shares.replica_imbalance) and uneven < 0.02
    lengths, cost = [4000] * 2 + [250] * 96, Cost(balance=8000)
    assert spread(cost)[0] < 0.03 and spread(None)[0] > 0.09


def test_a_layer_of_qwen2_7b_attends_as_dearly_as_it_multiplies_at_65_thousand_tokens():
    """A layer has 233 M parameters (28 layers hold 6.5 B) and 28 heads of 128."""
    sizes = Sizes(
        family="qwen2",
        num_layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        ffn=18944,
        vocab=152064,
        tied=False,
    )
    assert Cost.of_model(sizes, 0).balance == pytest.approx(233.05e6 / 3584, rel=1e-3)


def test_micro_batches_refuse_a_sequence_longer_than_the_budget():
    with pytest.raises(ValueError, match="micro_batch_tokens = 50"):
        micro_batches([10, 51], max_tokens=50, replicas=1)
