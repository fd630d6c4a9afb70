"""The test of the centre's design: methods that touch nothing but their own few lines (tests/helpers/open_centre.py).

Each is trained some updates by `megatron-rl train`'s own code on 2 ranks with real Megatron models, and checked for
what it must do.
"""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path

import cut_runs
import numpy as np
import open_centre
import pytest
import torch
from cut_runs import SMALL, config, role, write_speakers
from fake_endpoint import FakeEndpoint
from safetensors.torch import load_file
from tiny_models import make_model
from toys import characters

from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.metrics import read_metrics
from megatron_rl.types import STEP, Author

pytestmark = pytest.mark.multi
TOKENIZER = characters()
TAGS = [f"<{slash}{tag}>" for tag in ("question", "answer", "score") for slash in ("", "/")]  # one token each
ROOT = Path(__file__).parents[2]
RUBRIC = [
    {"criterion": "Is there a vowel?", "weight": 0.5},
    {"criterion": "Is there a capital?", "weight": 0.5},
    {"criterion": "Is there no @?", "weight": 0.0, "veto": True},
]


class Judge(FakeEndpoint):
    """Answers the rubric's questions about a text, in tokens. It mumbles about a text with a ~."""

    def completions(self, body):
        self.asked.append(body)
        question, _, response = TOKENIZER.decode(body["prompt"]).partition(" ~ ")
        good = {
            "Is there a vowel?": any(c in "aeiou" for c in response),
            "Is there a capital?": any(c.isupper() for c in response),
            "Is there no @?": "@" not in response,
        }[question]
        said = TOKENIZER("hm" if "~" in response else f"\\boxed{{{int(good)}}}")["input_ids"]
        ends = {"finish_reason": "length", "stop_reason": None}
        return {"choices": [{"index": 0, "text": "", "token_ids": said, **ends}]}


@pytest.fixture(scope="module")
def judge():
    fake = Judge()
    yield fake
    fake.close()


def evolve(base, name, roles):
    (base / "evolve.txt").write_text("{question} {answer} a")
    (base / "referring.txt").write_text("{references} {answer} a")
    names = ("proposer", "reference", "solver", "question", "answer")
    templates = {f"{each}_template": f"{base}/evolve.txt" for each in names}
    templates["reference_template"] = f"{base}/referring.txt"
    args = {"updates": 3, "proposals": 2, "answers": 2, "judgements": 1, "reference_share": 0.5, **templates}
    return config(base, name, "megatron_rl.contrib.evolve:Evolve", roles, args=args, prompts_per_iteration=16)


def grpo(base, name, **settings):
    loss, args = settings.pop("loss", {}), {"updates": 4, "group_size": 4, "template": f"{base}/template.txt"}
    target, more = settings.pop("target", "megatron_rl.recipes.grpo:Grpo"), settings.pop("args", {})
    own = {"generator": role(base, loss=loss, samples_per_optimizer_step=settings.pop("batch", None))}
    return config(base, name, target, settings.pop("roles", own), args=args | more, **settings)


@pytest.fixture(scope="module")
def servers():
    started = cut_runs.start_servers()
    yield started
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, judge, servers):
    """All runs, by one start of two ranks. -> the directory of the runs."""
    base = tmp_path_factory.mktemp("open")
    for seed, name in enumerate("abc"):
        make_model(base / name, "qwen2", vocab_size=97, num_hidden_layers=1, seed=seed, **SMALL)
        TOKENIZER.save_pretrained(base / name)
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    make_model(base / "experts", "qwen3_moe", vocab_size=97, num_hidden_layers=2, **SMALL | experts)
    TOKENIZER.save_pretrained(base / "experts")
    speakers = {"proposer": "speaker_a", "solver": "speaker_b", "judge": "speaker_c"}
    write_speakers(base, speakers.values(), ["<eos>", "a", "9", "10", *TAGS])
    cut_runs.write_data(base, RUBRIC)
    cut_runs.write_players(base)
    (base / "template.txt").write_text("{question}")
    (base / "judge.txt").write_text("{criterion} ~ {response}")
    (base / "key").write_text("sk-secret")
    endpoint = {"url": judge.url, "model": "judge", "key_file": f"{base}/key"}
    dynamic = {"target": "open_centre:DynamicSampling", "args": {"groups": 3}, "reward": "has_capital"}
    three = {n: role(base, model=model, lr=0.002, sampling={"max_tokens": 10}) for n, model in speakers.items()}
    shared = {n: role(base, model=None, same_as="proposer", sampling={"max_tokens": 10}) for n in ("solver", "judge")}
    one = {"proposer": three["proposer"]} | shared
    judging = role(base, policy="none", endpoint=endpoint, sampling={"max_tokens": 9})
    writers = {"generator": role(base), "judge": judging}
    templates = {"generator_template": f"{base}/template.txt", "judge_template": f"{base}/judge.txt"}
    rubric = "megatron_rl.contrib.rubric:Rubric", writers, {"updates": 3, "group_size": 4, **templates}
    pupil, teacher = partial(role, base, lr=0.01), role(base, model="b", policy="none")
    tags = {"target": "megatron_rl.environments.tool_task:ToolTask"}
    tools = [{"target": "megatron_rl.contrib.calculator:Calculator"}]
    tags["args"] = {"tools": tools, "template": f"{base}/plain.txt", "result": " b {result} b "}
    caller = role(base, model=cut_runs.CALLER, lr=0.002)
    distil = partial(config, base, recipe="megatron_rl.recipes.distil:Distil", prompts_per_iteration=16)
    lessons = {"updates": 12, "template": f"{base}/template.txt"}
    toward, over = {"objective": "open_centre:toward_teacher"}, {"objective": "distilled_top_k"}
    counting = {"environment": {"target": "open_centre:Counting"}, "rewards": {"letters": 1.0}, "group_size": 4}
    tool = partial(
        config, base, recipe="megatron_rl.recipes.agents:Agents", roles={"agent": role(base, layout={"tp": 1})},
        args={"updates": 3, **counting},
    )  # fmt: skip
    routed = {"generator": role(base, model="experts", layout={"ep": 2}, router_replay=True, loss={"centering": 4})}
    gated = {"preflight": {"reward": False, "max_logprob_gap": 1e-5}}
    configs = [
        grpo(base, "dynamic", **dynamic),
        grpo(base, "loss", loss={"objective": "open_centre:sequence_ratio"}, batch=8, iterations=2),
        grpo(base, "word", loss={"objective": "gspo"}, batch=8, iterations=2),
        grpo(base, "estimator", args={"estimator": "open_centre:median_baseline"}),
        evolve(base, "three", three),
        evolve(base, "one", one),
        config(base, "rubric", *rubric[:2], args=rubric[2]),
        config(base, "rubric_cut", *rubric[:2], args=rubric[2], iterations=1),
        config(base, "rubric_cut", *rubric[:2], args=rubric[2], iterations=3, resume="must"),
        cut_runs.judged_iterations(base, "iterations", caller, {"environment": tags}),
        tool("tool"),
        tool("tool_cut", iterations=1),
        tool("tool_cut", iterations=3, resume="must"),
        distil("distil", roles={"student": pupil(loss=toward), "teacher": teacher}, args=lessons),
        distil(
            "distil_top_k", roles={"student": pupil(loss=over, layout={"cp": 2}), "teacher": teacher},
            args=lessons | {"top_k": 8},
        ),
        grpo(base, "experts", roles=routed, iterations=2, train_without_signal=True, save_every=0) | gated,
    ]  # fmt: skip
    every = [(one_config, None) for one_config in configs] + cut_runs.cases(base, cut_runs.FEW, servers)
    cut_runs.run_all(base, every)
    return base / "runs"


def series(run, role, name):
    return [row.metrics[name] for row in read_metrics(run) if row.scope == role and name in row.metrics]


def credited_iterations(run):
    """What a run trained on in its iterations, in order, with advantages and scores."""
    return [pickle.loads(file.read_bytes()) for file in sorted((run / "credited").iterdir())]


def iterations(run, role):
    """The rollouts of a role, iteration by iteration."""
    return [collected.rollouts[role] for collected in credited_iterations(run)]


def weights(run, name):
    return load_file(run / "models" / name / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all((first[k] == second[k]).all() for k in first)


@pytest.mark.parametrize("name", open_centre.LINES)
def test_a_toy_stays_within_its_lines(name):
    has, may = open_centre.LINES[name]
    assert has <= may


@pytest.mark.parametrize("name", ["evolve", "self_play"])
def test_recipes_of_several_roles_stay_within_their_lines(name):
    assert open_centre.lines_of_code((ROOT / "megatron_rl/contrib" / f"{name}.py").read_text()) <= 150


def test_ppo_with_a_critic_is_one_recipe_file():
    assert open_centre.lines_of_code((ROOT / "megatron_rl/recipes/ppo.py").read_text()) <= 60


def test_dynamic_sampling_trains_groups_with_signal_alone_and_counts_every_prompt_once(runs):
    taken = series(runs / "dynamic", "generator", "prompts_taken")
    assert len(taken) == 4 and sum(taken) > 4 * 3, "some groups had no signal, and more prompts were taken"
    assert set(series(runs / "dynamic", "generator", "groups_without_signal")) == {0.0}
    state = Checkpoints(runs / "dynamic/checkpoints").newest().read_state()["data"]["generator"]
    assert state["epoch"] * 16 + state["position"] == sum(taken)
    assert sum(series(runs / "dynamic", "generator", "graded/error")) == 0


def test_a_loss_of_ones_own_trains_what_the_same_loss_of_ours_does(runs):
    own, ours = runs / "loss", runs / "word"
    assert series(own, "generator", "optimizer_steps") == [2.0] * 2
    assert all(abs(ratio - 1) > 1e-4 for ratio in series(own, "generator", "ratio"))
    for name in ("loss", "grad_norm", "ratio"):
        assert series(own, "generator", name) == pytest.approx(series(ours, "generator", name), rel=1e-4, abs=1e-6)
    first, second = weights(own, "generator"), weights(ours, "generator")
    assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first)


def test_an_estimator_of_ones_own_gives_the_advantages(runs):
    for rollouts in iterations(runs / "estimator", "generator"):
        groups = {r.group for r in rollouts}
        for group in groups:
            own = [r for r in rollouts if r.group == group]
            rewards = np.array([r.rewards["outcome"] for r in own])
            np.testing.assert_allclose([r.advantages for r in own], rewards - np.median(rewards), atol=1e-6)


@pytest.mark.parametrize("name", ["three", "one"])
def test_three_roles_learn_from_the_same_episodes(runs, name):
    run = runs / name
    roles = ("proposer", "solver", "judge")
    questions = []
    for iteration, collected in enumerate(credited_iterations(run)):
        assert list(collected.rollouts) == list(roles)
        for role_name in roles:
            for r in collected.rollouts[role_name]:
                assert r.role == role_name and not r.trainable[: r.start].any() and r.trainable[r.start :].all()
                assert r.versions == (iteration,), "every engine had its policy's newest weights"
        questions += [r.rewards["form"] > 0 for r in collected.rollouts["proposer"]]
        assert 0 < len(collected.rollouts["solver"]) <= len(collected.rollouts["judge"]) <= 2 * 16
    assert 0 < sum(questions) < len(questions) <= 3 * 2 * 16, "some proposals have a question"
    summary = json.loads((run / "summary.json").read_text())
    policies = roles if name == "three" else ("proposer",)
    assert summary["updates"] == dict.fromkeys(policies, 3)
    assert sorted(p.name for p in (run / "models").iterdir()) == sorted(policies)
    trained = [sum(r.num_trainable for part in p.rollouts.values() for r in part) for p in credited_iterations(run)]
    if name == "one":  # one update of all three roles' rollouts together
        assert series(run, "judge", "trained_tokens") == series(run, "solver", "trained_tokens") == trained
    else:
        each = [series(run, role_name, "trained_tokens") for role_name in roles]
        assert [sum(tokens) for tokens in zip(*each, strict=True)] == trained


def test_a_rubric_is_judged_behind_a_url(runs, judge):
    run = runs / "rubric"
    assert len(judge.asked) == 2 * 3 * 4 * 4 * 3, "by two runs, one of which was cut"
    ungraded = series(run, "generator", "ungraded")
    kept = [len(rollouts) for rollouts in iterations(run, "generator")]
    assert sum(ungraded) > 0 and [16 - left for left in ungraded] == kept, "a response without a score left its group"
    for rollouts in iterations(run, "generator"):
        for r in rollouts:
            text = TOKENIZER.decode(r.response, skip_special_tokens=True)
            wanted = 0.5 * any(c in "aeiou" for c in text) + 0.5 * any(c.isupper() for c in text)
            assert r.rewards["outcome"] == (0.0 if "@" in text else wanted) and "~" not in text, text


def test_a_run_with_a_judge_that_was_cut_goes_on_exactly(runs):
    assert same(weights(runs / "rubric_cut", "generator"), weights(runs / "rubric", "generator"))
    for name in ("reward/outcome", "ungraded", "loss"):
        assert series(runs / "rubric_cut", "generator", name) == series(runs / "rubric", "generator", name)


@pytest.mark.parametrize("case", cut_runs.FEW)  # the others are in test_resume_methods.py
def test_a_run_of_any_method_that_was_cut_goes_on_exactly(runs, case):
    cut_runs.assert_same(runs / case, runs / f"{case}_cut")
    cut_runs.assert_telling(runs / case, case, *cut_runs.FEW[case])


def test_tool_turns_train_what_the_model_wrote_and_nothing_that_the_tool_said(runs):
    run = runs / "tool"
    tokens = []
    for rollouts in iterations(run, "agent"):
        tokens.append(float(sum(r.num_trainable for r in rollouts)))
        for r in rollouts:
            assert r.spans[:, 2].tolist() == [Author.ENVIRONMENT, Author.POLICY, Author.ENVIRONMENT, Author.POLICY]
            said = TOKENIZER.decode(r.tokens[r.spans[2, 0] : r.spans[2, 1]])
            first = TOKENIZER.decode(r.tokens[r.spans[1, 0] : r.spans[1, 1]], skip_special_tokens=True)
            assert (
                said == f"[{sum(c.isalpha() for c in first)}]"
                and (r.logprobs[r.spans[2, 0] : r.spans[2, 1]] == 0).all()
            )
            assert r.length == len(r.response) == r.num_trainable
    assert series(run, "agent", "trained_tokens") == tokens
    assert max(series(run, "agent", "engine_gap")) < 1e-4, "the trainer reads the conversation as the engine did"
    assert same(weights(runs / "tool_cut", "agent"), weights(run, "agent")), "a run that was cut goes on exactly"
    assert series(runs / "tool_cut", "agent", "reward/letters") == series(run, "agent", "reward/letters")


def test_iterations_with_a_calculator_are_judged_and_each_learns_from_its_own_verdict(runs):
    run = runs / "iterations"
    roles = [("verifier",), ("agent",), ("verifier",), ("agent",), ("verifier",)]
    counts = set()
    for own, collected in zip(roles, credited_iterations(run), strict=True):
        rollouts = collected.rollouts[own[0]]
        assert len(rollouts) > 16
        for r in rollouts if own == ("agent",) else ():
            marks, spans = r.annotations_of(STEP), r.spans[r.spans[:, 2] == Author.POLICY]
            assert marks.ranges.tolist() == spans[:, :2].tolist(), "a turn is what the model wrote at a time"
            counts.add(len(marks))
            assert (marks.scores is None) == (len(r.payload["verdicts"]) != len(marks))
            credit = np.where(r.trainable, r.advantages, 0.0)
            assert all(len(set(credit[a:b].tolist())) == 1 for a, b in marks.ranges)
            if marks.scores is not None and len(marks) == 2:
                first, second = (credit[a] for a, _ in marks.ranges)
                assert (first < second) == (marks.scores[0] < _mean_step_reward(rollouts, r.group))
    assert {1, 2, 3} <= counts, "some called the calculator, up to four times"
    assert max(series(run, "agent", "engine_gap")) < 1e-4 and series(run, "agent", "alpha")[0] == 0.5
    assert set(series(run, "agent", "episodes/error")) == {0.0} and sum(series(run, "agent", "reward/tool_calls")) > 0
    assert all(0 < share < 1 for share in series(run, "agent", "verdicts_match"))
    assert Checkpoints(run / "checkpoints").newest().read_state()["recipe"][-1]["counts"]["wrong"] > 0


def _mean_step_reward(rollouts, group):
    return np.mean(
        np.concatenate([s for r in rollouts if r.group == group and (s := r.annotations_of(STEP).scores) is not None])
    )


@pytest.mark.parametrize(("name", "metric"), [("distil", "sampled_kl"), ("distil_top_k", "teacher_kl")])
def test_distillation_draws_the_student_to_its_teacher(runs, name, metric):
    gaps = series(runs / name, "student", metric)
    assert len(gaps) == 12 and sum(gaps[-4:]) < 0.8 * sum(gaps[:4]), gaps
    assert [p.name for p in (runs / name / "models").iterdir()] == ["student"]


def test_a_model_with_experts_trains_on_the_experts_that_its_embedded_engine_chose(runs):
    """Each of the two ranks trains half of the experts, and its engine has all of them, by refits."""
    [gap] = series(runs / "experts", "preflight", "preflight/logprob_gap_generator")
    gaps, replayed = (series(runs / "experts", "generator", name) for name in ("engine_gap", "replayed"))
    assert 0 < gap < 1e-5 and len(gaps) == 2 and max(gaps) < 1e-5
    tokens = [sum(len(r.tokens) for r in rollouts) for rollouts in iterations(runs / "experts", "generator")]
    assert replayed == pytest.approx([1 - 16 / n for n in tokens]), "all but the last token of each of 16 rollouts"
    shapes = {r.experts.shape for rollouts in iterations(runs / "experts", "generator") for r in rollouts}
    assert {shape[1:] for shape in shapes} == {(2, 3)}


def test_a_teachers_likeliest_tokens_are_in_the_store_and_cover_most_of_what_it_thinks(runs):
    for rollouts in iterations(runs / "distil_top_k", "student"):
        for r in rollouts:
            ids, logprobs = r.values["candidates"], r.values["teacher_candidate_logprobs"]
            assert ids.shape == logprobs.shape == (len(r.tokens), 8) and (ids.dtype, logprobs.dtype) == ("i4", "f4")
            assert (np.diff(logprobs[1:], axis=1) <= 0).all() and (logprobs[1:] < 0).all()
    masses = series(runs / "distil_top_k", "student", "teacher_mass")
    assert all(8 / 97 < mass < 1 for mass in masses)
