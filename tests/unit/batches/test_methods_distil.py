"""On-policy distillation over a teacher's likeliest tokens: against the full softmax by loops in float64, against
torch's kl_div, and against what released code gave for the same numbers (tests/golden/distillation.json)."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import specs as checks
import torch
import torch.nn.functional as F
from fake_engines import TableEngine
from fake_policy import TablePolicy
from stages import credited
from toys import characters

from megatron_rl.algorithms import objectives
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.batches.data_parallel_split import split_over_replicas
from megatron_rl.batches.packed_batch import STATISTICS, Statistics, by_name, pack, statistics_needed
from megatron_rl.batches.replica_batch import Work
from megatron_rl.config import plugins
from megatron_rl.config.files import load
from megatron_rl.config.schema import ConfigError, LossConfig, TrainConfig
from megatron_rl.engines.protocol import Sampling
from megatron_rl.megatron.vocab_statistics import vocab_parallel_statistics
from megatron_rl.recipes.distil import Distil
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.types import Author, Prompt, Rollout, spans_of

VOCAB, WIDTH, TOP = 11, 5, 3
TEXTS = [(2, 5), (1, 1), (4, 0), (3, 7)]  # tokens of the prompt and of the answer
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "distillation.json").read_text())
KINDS = [(kl, rest) for kl in ("forward", "reverse", "mixed") for rest in ("bucket", "renormalised", "zero")]


class Alone:
    """A group of one rank."""

    def size(self):
        return 1


def loss_of(kl, rest, **args):
    args = {"kl": kl, "rest": rest, **args}
    return PolicyLoss(LossConfig(objective="distilled_top_k", objective_args=args, kl_coef=0.0))


def make_rollouts(seed=0, *, top=TOP):
    """Rollouts with a teacher's log-probs of its `top` likeliest tokens at every place but the first."""
    rng, out = np.random.default_rng(seed), []
    for number, (prompt, answer) in enumerate(TEXTS):
        size = prompt + answer
        teacher = torch.from_numpy(1.5 * rng.standard_normal((size, VOCAB))).log_softmax(-1).topk(top)
        ids, logprobs = teacher.indices.int().numpy(), teacher.values.float().numpy()
        ids[0], logprobs[0] = 0, np.nan  # nothing is known of the first token, and nobody may look
        out.append(
            Rollout(
                role="student", group=str(number), tokens=rng.integers(0, VOCAB, size), logprobs=np.zeros(size),
                spans=spans_of((prompt, Author.ENVIRONMENT, -1), (answer, Author.POLICY, 0)),
                values={"candidates": ids, "teacher_candidate_logprobs": logprobs},
            )
        )  # fmt: skip
    return out


def divergence(logits, values, place, kl, rest, share):
    """The divergence at one place of a rollout by the formula, token for token. logits [V] float64"""
    ids, teacher = values["candidates"][place].tolist(), values["teacher_candidate_logprobs"][place].tolist()
    student = {v: (logits[v] - torch.logsumexp(logits, 0)).exp() for v in range(len(logits))}
    told = {v: torch.tensor(t, dtype=torch.float64).exp() for v, t in zip(ids, teacher, strict=True)}
    if rest == "zero":
        whole = sum(told.values())
        p = {v: told[v] / whole if v in told else torch.tensor(-100.0, dtype=torch.float64).exp() for v in student}
        q, shown = student, told  # the teacher has as good as nothing outside
    else:
        p, q, shown = dict(told), {v: student[v] for v in told}, [*told]
        if rest == "bucket":
            p["other"], q["other"] = 1 - sum(p.values()), sum(student[v] for v in student if v not in told)
            shown = [*p]
        else:
            p, q = ({v: x[v] / sum(x.values()) for v in x} for x in (p, q))
    forward = sum(p[v] * (p[v] / q[v]).log() for v in shown)
    reverse = sum(q[v] * (q[v] / p[v]).log() for v in q)
    share = {"forward": 1.0, "reverse": 0.0, "mixed": share}[kl]
    return share * forward + (1 - share) * reverse


@pytest.mark.parametrize(("kl", "rest"), KINDS)
def test_loss_and_gradients_are_those_of_the_whole_softmax(kl, rest):
    rollouts = [replace(r, advantages=0.0) for r in make_rollouts()]
    batch, loss = pack(rollouts), loss_of(kl, rest, forward_share=0.3)
    draw = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(len(batch.tokens), WIDTH, generator=draw), torch.randn(VOCAB, WIDTH, generator=draw)
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    wanted = sum(
        divergence(exact[1] @ exact[0][i], r.values, t, kl, rest, 0.3)
        for r, start in zip(rollouts, batch.cu_seqlens.tolist(), strict=False)
        for t, i in zip(range(1, len(r.tokens)), range(start, start + len(r.tokens)), strict=False)
        if r.trainable[t]
    )  # fmt: skip
    wanted.backward()
    ours = [x.clone().requires_grad_() for x in (hidden, head)]
    names = statistics_needed(loss.needs)
    rows = vocab_parallel_statistics(
        *ours, batch.labels, first_row=0, vocab=VOCAB, temperature=1.0, group=Alone(), names=names,
        candidates=batch.values["candidates"].long(),
    )  # fmt: skip
    total, sums = loss(Statistics(**by_name(names, rows)), batch)
    total.backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert sums["teacher_kl"].item() == pytest.approx(wanted.item(), rel=1e-5)
    for own, other in zip(ours, exact, strict=True):
        assert torch.allclose(own.grad.double(), other.grad, rtol=1e-4, atol=1e-5), (own.grad - other.grad).abs().max()


@pytest.mark.parametrize(("kl", "rest"), KINDS)
def test_with_the_whole_vocabulary_it_is_torchs_divergence(kl, rest):
    if kl == "mixed":
        return
    draw = torch.Generator().manual_seed(2)
    logits, teacher = torch.randn(2, 6, VOCAB, generator=draw, dtype=torch.float64).unbind()
    logits, teacher = logits.requires_grad_(), (2 * teacher).log_softmax(-1)
    student = logits.log_softmax(-1)
    pair = (student, teacher) if kl == "forward" else (teacher, student)
    wanted = F.kl_div(*pair, reduction="none", log_target=True).sum(-1)
    loss = told(logits, teacher.topk(VOCAB), kl=kl, rest=rest)
    assert torch.allclose(loss, wanted, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (loss, wanted)]
    assert torch.allclose(*slopes, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_loss_and_gradient_are_those_of_released_code(name):
    case = GOLDEN["cases"][name]
    logits = torch.tensor(GOLDEN["student_logits"], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor(GOLDEN["teacher_logits"], dtype=torch.float64).log_softmax(-1)
    loss = told(logits, teacher.topk(GOLDEN["k"]), **case["args"])
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(case["loss"], abs=1e-10)
    assert logits.grad.flatten().tolist() == pytest.approx(sum(case["gradient"], []), abs=1e-10)


def told(logits, top, **args):
    """The objective's loss of every place, [N], of float64 logits [N, V] and a teacher's likeliest tokens."""
    size = len(logits)
    tokens = np.zeros(size + 1, np.int32)
    values = {"candidates": np.zeros((size + 1, 1), np.int32), "teacher_candidate_logprobs": np.zeros((size + 1, 1))}
    one = Rollout(
        role="student", group="0", tokens=tokens, logprobs=np.zeros(size + 1), advantages=0.0, values=values,
        spans=spans_of((1, Author.ENVIRONMENT, -1), (size, Author.POLICY, 0)),
    )  # fmt: skip
    batch = replace(pack([one]), values={"teacher_candidate_logprobs": F.pad(top.values, (0, 0, 0, 1))})
    every = F.pad(logits.log_softmax(-1), (0, 0, 0, 1))
    candidates = every.gather(1, F.pad(top.indices, (0, 0, 0, 1)))
    live = Statistics(every[:, 0], -(every.exp() * every).sum(-1), None, candidates)
    answer, _ = objectives.find("distilled_top_k", args)(live, batch, **args)
    return answer[:size]


def test_words_and_shares_that_there_are_not_are_refused():
    for args, says in (
        ({"kl": "sideways"}, "loss.objective_args.kl = 'sideways': give 'forward', 'reverse' or 'mixed'"),
        ({"rest": "dropped"}, "loss.objective_args.rest = 'dropped'"),
        ({"forward_share": 1.5}, "loss.objective_args.forward_share = 1.5"),
        ({"beta": 1.0}, "beta: distilled_top_k takes kl, forward_share, rest"),
    ):
        with pytest.raises(ConfigError, match=says):
            PolicyLoss(LossConfig(objective="distilled_top_k", objective_args=args))


def test_values_of_several_numbers_a_token_travel_with_their_tokens():
    rollouts, loss = make_rollouts(), loss_of("reverse", "bucket")
    rollouts = [r for r in rollouts if r.num_trainable]
    shares = split_over_replicas(rollouts, TablePolicy(VOCAB, micro_batch_tokens=12), loss=loss)
    work = Work.over(shares.buffer(0), shares.outline, 0)
    assert len(work.micros()) > 1
    for micro in work.micros():
        batch = work.batch(micro)
        ids, logprobs = batch.values["candidates"], batch.values["teacher_candidate_logprobs"]
        assert (ids.dtype, logprobs.dtype, ids.shape) == (torch.int32, torch.float32, (len(batch.tokens), TOP))
        for place, number in enumerate(work.flat.numbers[micro.first : micro.last].tolist()):
            own = slice(*batch.cu_seqlens[place : place + 2].tolist())
            assert ids[own][:-1].tolist() == rollouts[number].values["candidates"][1:].tolist()
            wanted = rollouts[number].values["teacher_candidate_logprobs"][1:]
            assert logprobs[own][:-1].numpy().tobytes() == wanted.tobytes()
        clean = batch.cleaned().values["candidates"]
        assert clean.dtype == torch.int32 and not clean[~batch.counted].any() and clean[batch.counted].any()
    dummy = work.batch(work.micros()[0]).dummy(4)
    assert {name: tuple(value.shape) for name, value in dummy.values.items()} == dict.fromkeys(batch.values, (4, TOP))
    other = make_rollouts(top=TOP + 1)[0]
    with pytest.raises(
        ValueError, match="values 'candidates' of .*: give all rollouts of an update values of one width"
    ):
        split_over_replicas([rollouts[0], other], TablePolicy(VOCAB), loss=loss)
    with pytest.raises(ValueError, match="has no values 'candidates, teacher_candidate_logprobs'"):
        split_over_replicas([replace(rollouts[0], values={})], TablePolicy(VOCAB), loss=loss)


def test_statistics_of_candidates_are_asked_for_by_their_name_alone():
    assert statistics_needed(PolicyLoss(LossConfig(objective="distilled")).needs) == ("logprobs", "entropy")
    assert statistics_needed(loss_of("forward", "zero").needs) == ("logprobs", "entropy", "candidate_logprobs")
    rows = torch.arange(12.0).view(6, 2)
    found = by_name(STATISTICS, rows)
    assert found["vocab_mean"].tolist() == [4.0, 5.0]
    assert found["candidate_logprobs"].tolist() == [[6.0, 8.0, 10.0], [7.0, 9.0, 11.0]]


@pytest.fixture
def context():
    tokenizer = characters()
    engines = {}
    for seed, name in enumerate(("student", "teacher")):
        engines[name] = TableEngine(97, tokenizer.eos_token_id)
        engines[name].load(TablePolicy(97, seed=seed).weights(), version=0)
    samplings = dict.fromkeys(engines, Sampling(max_tokens=5))
    return RolloutContext(
        engines=engines, tokenizers=dict.fromkeys(engines, tokenizer), samplings=samplings,
        max_prompt_tokens=dict.fromkeys(engines, 50), grade=lambda responses, payloads: [],
    )  # fmt: skip


class Problems:
    def take(self, count=None):
        return [Prompt(id=str(i), tokens=[5 + i, 6, 7]) for i in range(3)]


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_student_is_told_what_its_teacher_thinks_of_what_it_wrote(context, top_k):
    recipe = Distil(updates=2, group_size=2, top_k=top_k)
    iteration = Iteration(cycle=0, index=0, roles=("student",), number=0)
    rollouts = credited(recipe, iteration, Problems(), context)["student"]
    assert len(rollouts) == 6 and len({r.group for r in rollouts}) == 3 and all(r.num_trainable for r in rollouts)
    gaps = []
    for r, scores in zip(rollouts, context.engines["teacher"].score([r.tokens for r in rollouts]), strict=True):
        assert r.values["teacher_logprobs"].tolist() == scores.tolist() and r.advantages is None
        gaps += (r.logprobs - scores)[r.trainable].tolist()
        assert set(r.values) == {"teacher_logprobs"} | (
            {"candidates", "teacher_candidate_logprobs"} if top_k else set()
        )
        if top_k:
            ids, logprobs = r.values["candidates"], r.values["teacher_candidate_logprobs"]
            assert ids.shape == logprobs.shape == (len(r.tokens), top_k) and (ids.dtype, logprobs.dtype) == ("i4", "f4")
            for t in range(1, len(r.tokens)):
                alone = [*r.tokens[:t], 0]
                for token, logprob in zip(ids[t].tolist(), logprobs[t].tolist(), strict=True):
                    alone[-1] = token
                    assert context.engines["teacher"].score([alone])[0][-1] == pytest.approx(logprob, abs=1e-6)
    assert context.metrics["student"]["sampled_kl"] == pytest.approx(np.mean(gaps), abs=1e-6)


def test_arguments_that_cannot_be_are_refused():
    for args, says in (
        ({"updates": 0}, "updates = 0: give a value greater than or equal to 1"),
        ({"updates": 1, "group_size": 0}, "group_size = 0: give a value greater than or equal to 1"),
        ({"updates": 1, "top_k": -1}, "top_k = -1: give a value greater"),
        ({"updates": 1, "template": "nowhere"}, "recipe.args.template"),
    ):
        with pytest.raises(ConfigError, match=says):
            plugins.build(plugins.Use(target="megatron_rl.recipes.distil:Distil", args=args))


def own_objective(live, batch):
    return -live.logprobs * batch.values["teacher_logprobs"]


@objectives.objective(needs=["teacher_logprobs", "teacher_candidate_logprobs"])
def own_over_candidates(live, batch):
    return batch.values["teacher_candidate_logprobs"].sum(-1)


@pytest.mark.parametrize(
    ("objective", "top_k", "says"),
    [
        ("distilled_top_k", 0, "can be had from the recipe megatron_rl.recipes.distil:Distil with recipe.args.top_k"),
        (f"{__name__}:own_over_candidates", 0, "needs teacher_candidate_logprobs and teacher_logprobs, and"),
        ("distilled", 8, "candidates, teacher_candidate_logprobs and teacher_logprobs: take distilled_top_k"),
        ("clipped", 0, "roles.student.loss.objective = 'clipped' needs advantages, and"),
        (f"{__name__}:own_objective", 0, "needs advantages"),  # it does not declare that it reads the teacher
        ("distilled", 0, None),
        ("distilled_top_k", 1, None),
        (f"{__name__}:own_over_candidates", 4, None),
        ("distilled", "0, retokenise: true", None),
        ("distilled_top_k", "8, retokenise: true", "top_k = 8 with retokenise: the teacher's tokens have other ids"),
    ],
)
def test_a_loss_and_a_top_k_that_do_not_go_together_are_refused_before_anything_starts(objective, top_k, says):
    settings = [f"roles.student.loss.objective={objective}", "roles.student.model.path=x/y", "data.path=p.jsonl"]
    settings += ["roles.teacher={policy: none, model: {path: x/z}}", "recipe.target=megatron_rl.recipes.distil:Distil"]
    config = load(TrainConfig, [], [*settings, f"recipe.args={{updates: 1, top_k: {top_k}}}"])
    if says is None:
        checks.check_recipe(config, plugins.build(config.recipe))
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        checks.check_recipe(config, plugins.build(config.recipe))
