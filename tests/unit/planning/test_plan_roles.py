"""Plans of iterations that train several roles, of roles that share a policy or servers, and of the longest answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import Unscored, case_of, spec_of, work_of_run

from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config.schema import TrainConfig
from megatron_rl.main import main
from megatron_rl.planning import plan as plans
from megatron_rl.planning import search
from megatron_rl.planning.case import own_cluster, server_gpus
from megatron_rl.planning.plan import RunPlan
from megatron_rl.planning.workload import draws_of

EXAMPLES = Path(__file__).parents[3] / "examples"
SHARED, THREE = "published/self_play_ssp_qwen2.5_7b", "published/evolve_three_qwen2.5_3b"


def load(example: str, *settings: str) -> TrainConfig:
    return config_files.load(TrainConfig, [EXAMPLES / f"{example}.yaml"], list(settings))


class Apart(Unscored):
    """The recipe of a config with one iteration for each of its roles in place of one iteration for all."""

    def __init__(self, config: TrainConfig) -> None:
        self.parts = plugins.build(config.recipe).roles()

    def roles(self):
        return self.parts

    def schedule(self):
        return [[(name,) for name in self.parts]]


def made(config: TrainConfig, recipe: Apart | None = None) -> RunPlan:
    spec = spec_of(config)
    return plans.make(case_of(config, own_cluster(spec.engine, spec.cluster), recipe))


def test_a_role_that_shares_a_policy_has_the_cache_of_its_servers():
    """Its cache was taken for empty, so that a server decoded one of its answers at a time: 7,190 s a step."""
    found = made(load(SHARED))
    [iteration] = found.iterations
    assert iteration.rows["solver"] == 80, "all of 256 x 5 answers to 16 servers"
    assert iteration.phases["rollout solver"] < 2 * iteration.phases["rollout proposer"] and found.cycle_s < 700
    config = load(SHARED)
    assert [one.rows["solver"] for one in made(config, Apart(config)).iterations] == [80, 80]


def test_an_iteration_of_several_roles_is_generated_once_and_updates_each_of_them():
    """It was counted once for each role that it trains, generation and all."""
    config = load(SHARED)
    together, apart = made(config), made(config, Apart(config))
    assert [iteration.role for iteration in together.iterations] == ["proposer + solver"]
    [both], (proposer, solver) = together.iterations, apart.iterations
    assert both.phases["rollout solver"] == proposer.phases["rollout solver"] == solver.phases["rollout solver"]
    assert both.generated == proposer.generated and both.trained == proposer.trained + solver.trained
    for phase in ("reference log-probs", "forward and backward"):
        assert both.phases[phase] == pytest.approx(proposer.phases[phase] + solver.phases[phase], rel=0.05), phase
    # 256 x (1 + 5) samples in two optimizer steps, and one refit
    assert both.phases["optimizer"] == pytest.approx(2 * proposer.phases["optimizer"])
    assert both.sent == proposer.sent and both.phases["sleep and wake"] == proposer.phases["sleep and wake"]


def test_an_iteration_updates_and_refits_every_policy_that_it_trains():
    shared, three = made(load("published/evolve_qwen2.5_3b")), made(load(THREE))
    [one], [each] = shared.iterations, three.iterations
    assert one.role == each.role == "proposer + solver + judge" and three.iterations[0].times == 1
    assert each.sent == pytest.approx(3 * one.sent) and each.trained == one.trained
    assert each.phases["forward and backward"] == pytest.approx(one.phases["forward and backward"], rel=0.1)


def test_a_critic_is_trained_and_scores_are_passes():
    """The plan took a critic for a frozen model, without an optimizer and without seconds of training, and left out
    the score stage."""
    ppo = "published/methods/ppo"
    with_kl, without = made(load(ppo)), made(load(ppo, "recipe.args.estimator=gae"))
    alone = made(load("published/methods/grpo", *(f"roles.generator.{setting}" for setting in (
        "sampling.max_tokens=512", "samples_per_optimizer_step=256")), "run.prompts_per_iteration=1024",
        "recipe.args.group_size=1", "recipe.args.estimator=reinforce_pp"))  # fmt: skip
    for plan in (with_kl, without):
        [iteration] = plan.iterations
        assert iteration.role == "generator + critic" and iteration.trained == 2 * alone.iterations[0].trained
        both = iteration.phases["forward and backward"] / alone.iterations[0].phases["forward and backward"]
        assert both == pytest.approx(2, rel=0.05), "the critic has the generator's layout, and no output layer"
        generator, critic = (role.training for role in plan.roles)
        assert 0.9 * generator.optimizer < critic.optimizer < generator.optimizer
    passes = [{name: s for name, s in p.iterations[0].phases.items() if "score" in name} for p in (with_kl, without)]
    assert list(passes[1]) == ["score generator by critic"]
    own, reference = (f"score generator by {of}generator" for of in ("", "the reference of "))
    assert list(passes[0]) == ["score generator by critic", own, reference]
    assert passes[0][reference] > passes[0][own] == pytest.approx(without.iterations[0].phases["old log-probs"])
    assert "reference log-probs" not in with_kl.iterations[0].phases


def test_a_reward_models_pass_and_the_reference_of_a_loss_on_pairs_are_counted():
    paths = [f"roles.{name}.model.path=Qwen/Qwen2.5-0.5B" for name in ("generator", "reward")]
    texts = made(load("miniatures/reward_model/scored", *paths))
    assert texts.iterations[0].phases["score reward by reward"] > 0 == texts.roles[1].training.optimizer
    pairs = made(load("miniatures/last_letter/online_dpo", paths[0]))
    assert pairs.iterations[0].phases["reference log-probs"] > 0


@pytest.mark.parametrize(
    ("example", "role", "drawn", "trained"),
    [
        ("published/dapo_qwen2.5_32b", "generator", 512 * 48, 512 * 16),
        (THREE, "judge", 128 * 31, 128),
        ("published/pairwise_qwen3_8b", "generator", 64 * 8, 64 * 7),
    ],
)
def test_what_is_drawn_beyond_an_update_is_not_trained_on(example, role, drawn, trained):
    spec = spec_of(load(example))
    [work] = [iteration for iteration in work_of_run(spec) if role in iteration.roles]
    assert {d.role: d.samples for d in work.draws}[role] == drawn
    assert {d.role: d.samples for d in work.trained}[role] == trained
    half = f"{role}.{role}={drawn / spec.run.prompts_per_iteration / 2}"
    [less] = work_of_run(spec, draws=draws_of(spec.roles, [half]))
    assert {d.role: d.samples for d in less.trained}[role] == trained / 2, "as large a share of what is drawn"


def test_memory_holds_the_longest_answers_of_all_roles_of_a_policy():
    long = {"roles.solver.max_prompt_tokens": 8192, "roles.solver.sampling.max_tokens": 16384}
    settings = [f"{name}={value}" for name, value in long.items()]
    short, longer = made(load(SHARED)), made(load(SHARED, *settings))
    assert longer.servers[0].sequences == pytest.approx(short.servers[0].sequences / 2)
    embedded = load(SHARED, "engine={kind: embedded}")
    token = 28 * 2 * 4 * 128 * 2  # bytes of keys and values: layers, both, heads, width, bfloat16
    assert made(embedded).roles[0].cache == 80 * 12288 * token, "of the solver, which has five samples for one"


def test_roles_that_share_servers_are_written_one_after_the_other():
    own = "replicas: 4, tp: 2, max_batch: 512, max_model_len: 8192, memory_share: 0.9"
    shared = made(load("published/tango_lora_qwen2.5_7b", f"engine={{kind: vllm, adapters: served, {own}}}"))
    apart = made(load("published/tango_lora_qwen2.5_7b", f"engine={{kind: vllm, adapters: merged, {own}}}"))
    assert [server.role for server in shared.servers] == ["generator"] and len(apart.servers) == 2
    assert shared.iterations[0].phases["rollout generator"] == apart.iterations[0].phases["rollout generator"]
    assert shared.iterations[0].phases["rollout verifier"] > apart.iterations[0].phases["rollout verifier"] + 10


def test_what_an_endpoint_answers_is_left_out_and_said(capsys):
    """Its server was taken for one without a cache, which decodes one answer at a time: 172,263 s a step."""
    config = load("published/rubric_qwen3_30b_a3b")
    assert list(made(config).iterations[0].rows) == ["generator"]
    assert main(["plan", str(EXAMPLES / "published/rubric_qwen3_30b_a3b.yaml"), "--json"]) == 0
    assert (
        "judge is played by an endpoint: what its answers take is not in this plan"
        in (json.loads(capsys.readouterr().out)["advice"])
    )


def test_only_roles_that_the_trainer_holds_are_cut(capsys):
    """A search of two roles with one policy found every layout twice, and engines for half of the GPUs."""
    case = case_of(load(SHARED, "engine.colocate=false"), "4x8xA100-80")
    gpus = [server_gpus(one.spec.engine) for one in search.engine_choices(case)]
    assert max(gpus) == 24, "of one role"
    found = search.search(case)
    words = [tuple(one.overrides) for one in found]
    assert len(set(words)) == len(words) > 1 and not any("solver" in word for one in words for word in one)
    main(["plan", str(EXAMPLES / f"{SHARED}.yaml"), "--cluster", "2x8xA100-40", "--search"])
    assert "recompute_modules=[" in capsys.readouterr().out, "brackets were taken for a style"


def test_a_role_that_is_trained_in_float32_is_said(capsys):
    """A user would have submitted 7 B parameters in float32, the default, which is right on a laptop alone."""
    words = ["plan", str(EXAMPLES / "published/grpo_qwen2.5_7b.yaml"), "--cluster", "4x8xA100-80"]
    said = "roles.generator.model.dtype is float32: set bfloat16"
    assert main(words) == 0 and said not in capsys.readouterr().out
    main([*words, "roles.generator.model.dtype=float32"])
    assert said in capsys.readouterr().out


def test_a_longest_answer_that_a_request_may_not_wait_for_is_said():
    """ScaleRL's answers of 14,336 tokens took longer than a request may."""
    case = case_of(load("published/scalerl_qwen3_8b", "engine.request_timeout_s=600"), "2x8xA100-80")
    found = plans.make(case)
    seconds = found.iterations[0].longest["generator"]
    assert 400 < seconds < 600, "of 256 rows"

    def said(timeout_s: float) -> list[str]:
        other = case.with_engine(replace(case.servers, request_timeout_s=timeout_s))
        return [line for line in search.advice(other, found) if "request_timeout_s" in line]

    [line] = said(600)
    value = int(line.rpartition("engine.request_timeout_s=")[2])
    assert f"takes {seconds:.0f} s among the 256" in line and 0 <= value - 2 * seconds < 100
    assert not said(value) and said(2 * seconds - 1)


def test_a_tandem_writes_its_longest_answer_with_two_models():
    alone, pair = load("published/tango_qwen2.5_7b"), load("published/tango_qwen2.5_7b", "roles.generator.tandem={}")
    one, two = (made(config).iterations[0] for config in (alone, pair))
    assert two.longest["generator"] > 1.5 * one.longest["generator"]
    assert two.longest["verifier"] == one.longest["verifier"]


def test_a_role_of_which_next_to_nothing_is_drawn_is_planned(capsys):
    file = str(EXAMPLES / "published/tango_qwen2.5_7b.yaml")
    assert main(["plan", file, "--cluster", "4x8xA100-80", "--draws", "generator.verifier=0.0001", "--json"]) == 0
    iteration = json.loads(capsys.readouterr().out)["iterations"][0]
    assert 0 < iteration["phases"]["rollout verifier"] < 20
