"""Tests `megatron-rl plan`: memory against the actor's, time against published runs, the search, and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
from conftest import ROOT, environment
from plan_cases import Unscored, case_of, spec_of, work_of_run
from ranks import run_ranks
from tiny_models import make_model

from megatron_rl.config import files as config_files
from megatron_rl.config.schema import ConfigError, Layout, TandemConfig, TrainConfig
from megatron_rl.main import main
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import phases, search
from megatron_rl.planning import plan as plans
from megatron_rl.planning.compute import SequenceBatch
from megatron_rl.planning.hardware import DEVICES, GIB
from megatron_rl.planning.memory import Precision
from megatron_rl.planning.workload import draws_of, fills_of
from megatron_rl.training.iteration import RecipeRole
from megatron_rl.weights import parameter_mapping
from megatron_rl.weights.counting import Parallel

KIND = "engine.kind=vllm"

TANGO = "examples/published/tango_qwen2.5_7b.yaml"
OWN_GPUS = "colocate: false, memory_share: 0.9"  # of servers, in place of the example's
BF16 = Precision.gpu("bfloat16")


class Duet(Unscored):
    """A recipe with two generator iterations and one verifier iteration in a cycle.

    A generator iteration draws 4 samples of each role; a verifier iteration draws 1 of the generator and 4 of the
    verifier.
    """

    def roles(self):
        return {
            "generator": RecipeRole(samples=4, drawn={"generator": 4, "verifier": 4}),
            "verifier": RecipeRole(samples=4, drawn={"generator": 1, "verifier": 4}),
        }

    def schedule(self):
        return [[("generator",), ("generator",), ("verifier",)]] * 2

    def check(self, spec):
        """Takes every run."""


def load(*overrides: str) -> TrainConfig:
    return config_files.load(TrainConfig, [ROOT / TANGO], list(overrides))


def both(setting: str, value: str) -> list[str]:
    return [f"roles.{name}.{setting}={value}" for name in ("generator", "verifier")]


def planned(capsys, *arguments: str) -> tuple[int, dict]:
    status = main(["plan", str(ROOT / TANGO), "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_the_papers_run_on_its_32_a100(capsys):
    status, found = planned(capsys, "--cluster", "4x8xA100-80")
    assert status == 0 and found["fits"] and found["trainer_gpus"] == 32
    for role in found["roles"]:
        assert role["parameters"] == 7_615_616_512 and role["layout"]["dp"] == 16
        held = role["training"]
        assert held["weights"] == pytest.approx(7.62e9, rel=0.01) and held["gradients"] == 2 * held["weights"]  # tp 2
        assert held["optimizer"] == pytest.approx(6 * held["weights"] / 16)
        assert 60 * GIB < role["peak"] < 79 * GIB
        assert role["asleep"] == 0  # servers stand in the GPUs
    assert [(iteration["role"], iteration["times"]) for iteration in found["iterations"]] == [
        ("generator", 3),
        ("verifier", 1),
    ]
    generator, verifier = found["iterations"]
    assert generator["trained"] == 256 * 5 * 2048 and verifier["trained"] == 256 * 5 * 4096  # half of the longest
    assert 200 < found["cycle_s"] < 2000 and any("of the work of a cycle" in line for line in found["advice"])


def test_the_plan_says_what_each_other_engine_gives(capsys):
    """The figure of every engine is that of a plan of its own, made with the settings that stand beside it."""
    _, found = planned(capsys, "--cluster", "4x8xA100-80")
    asked, *others = found["engines"]
    assert (asked["overrides"], asked["cycle_s"]) == ([], found["cycle_s"])
    assert asked["engine"] == "8 vllm servers of 4 GPUs for each role, in the trainer's GPUs"
    assert (asked["engine_gpus"], asked["trainer_gpus"]) == (0, 32)
    assert others[0]["engine"].startswith("embedded") and others[0]["trainer_gpus"] == 32
    served = [one for one in others[1:] if "rollouts.max_staleness=1" not in one["overrides"]]
    ahead = [one for one in others if "rollouts.max_staleness=1" in one["overrides"]]
    assert len(served) == 3 and any("engine.colocate=false" in one["overrides"] for one in served)
    assert [one["cycle_s"] for one in served] == sorted(one["cycle_s"] for one in served)
    own = [one["cycle_s"] for one in served if "engine.colocate=false" in one["overrides"]]
    assert len(ahead) == 1 and ahead[0]["cycle_s"] < min(own)
    for one in others:
        _, again = planned(capsys, "--cluster", "4x8xA100-80", *one["overrides"])
        assert again["fits"] and again["cycle_s"] == pytest.approx(one["cycle_s"]), one
        assert again["trainer_gpus"] == one["trainer_gpus"]


def test_servers_and_trainer_have_the_whole_memory_by_iterations(capsys):
    """Counted by hand for 32 GPUs with a server of each role in each group of four."""
    _, found = planned(capsys, "--cluster", "4x8xA100-80")
    weights = 7_615_616_512 * 2
    for server in found["servers"]:
        assert server["weights"] == weights / 4 and server["asleep"] == plans.ASLEEP
        assert server["share"] == pytest.approx(0.43 * 79.2 * GIB)
    assert found["rollout_peak"] == pytest.approx(2.5 * GIB + 2 * 0.43 * 79.2 * GIB)
    for role in found["roles"]:
        held = role["training"]
        alone = sum(held[part] for part in ("weights", "gradients", "optimizer", "workspace", "activations"))
        assert role["peak"] == pytest.approx(found["reserve"] + alone + 2 * plans.ASLEEP)
    [generator, _] = found["iterations"]
    moved = weights / 2 * (1 + 6 / 16) + weights / 4  # its own weights and optimizer, and the verifier's server
    changes = 2 * moved / 20e9 + 2 * phases.CHANGE_S
    assert generator["phases"]["sleep and wake"] == pytest.approx(changes, rel=0.01)
    kept = plans.SERVER_COPY * weights / 4  # of the other role's server; the roles keep a reference each, too
    assert found["host_per_node"] / 8 == pytest.approx(2 * (weights / 2 * (2 + 6 / 16)) + kept, rel=0.01)
    _, more = planned(capsys, "--cluster", "4x8xA100-80", "engine.memory_share=0.49")
    assert any("while servers generate in it" in line for line in more["problems"])


def test_host_memory_in_which_servers_receive_weights_is_counted(capsys):
    """Counted by hand: a layer of Qwen2.5-7B on two ranks, each tensor rounded up to a power of two."""
    own = ["job.nodes=2", "engine.colocate=false", "engine.replicas=4", "engine.tp=2", "engine.memory_share=0.9"]
    _, found = planned(capsys, "--cluster", "4x8xA100-80", *own, "rollouts.max_staleness=1")
    mib = 2**20
    # qkv [2304, 3584] and its bias, o [3584, 1792], gate and up [18944, 3584], down [3584, 9472], norms
    layer = 16 * mib + 8192 + 16 * mib + 256 * mib + 128 * mib + 2 * 8192
    vocabulary = 1024 * mib  # [76032, 3584]: 520 MiB
    assert [server["staging"] for server in found["servers"]] == [28 * layer + 2 * vocabulary + 8192] * 2
    assert found["staging_per_node"] == 8 * found["servers"][0]["staging"]
    for other in ("refit.staging=off", "refit.staging=device"):
        _, found = planned(capsys, "--cluster", "4x8xA100-80", *own, "rollouts.max_staleness=1", other)
        assert found["staging_per_node"] == 0


def test_mean_lengths_of_a_config_are_what_is_planned_with():
    config = load("roles.verifier.mean_tokens={prompt: 900, answer: 600}")
    verifier = next(
        iteration for iteration in work_of_run(spec_of(config, Duet())) if iteration.role == "verifier"
    ).trained[0]
    assert (verifier.prompt, verifier.response) == (900, 600)
    said = fills_of(config.roles, ["0.25"])
    verifier = next(
        iteration for iteration in work_of_run(spec_of(config, Duet()), fills=said) if iteration.role == "verifier"
    ).trained[0]
    assert (verifier.prompt, verifier.response) == (1024, 1024)


def test_shared_prompts_take_less_time_and_as_much_is_trained(capsys):
    """Five samples of a prompt as long as the answer: 1.2 tokens are computed where 2 were."""
    found = [
        planned(capsys, "--cluster", "4x8xA100-80", *both("shared_prefixes", text))[1] for text in ("true", "false")
    ]
    for once, whole in zip(*(one["iterations"] for one in found), strict=True):
        assert once["trained"] == whole["trained"]
        for phase in ("forward and backward", "reference log-probs"):
            assert 0.58 < once["phases"][phase] / whole["phases"][phase] < 0.72
        same = ("rollout generator", "rollout verifier", "optimizer", "refit", "sleep and wake")
        assert all(once["phases"][phase] == whole["phases"][phase] for phase in same)
    for once, whole in zip(*(one["roles"] for one in found), strict=True):  # attention keeps prompts for each sample
        assert once["training"]["activations"] > 1.005 * whole["training"]["activations"]


def test_a_prompt_is_shared_by_the_samples_that_fit_into_a_micro_batch():
    batch = SequenceBatch(sequences=20, length=4000, micro_tokens=26_000, prompt=2000, per_prompt=10)
    assert batch.repeated == 20 * (1 - 1 / 10) and batch.tokens == 20 * 2000 + 2 * 2000
    halves = replace(batch, micro_tokens=12_000)  # five of them, and the prompt once
    assert halves.repeated == 20 - 4 and replace(batch, micro_tokens=4096).repeated == 0
    assert replace(batch, per_prompt=1.0).repeated == 0


@pytest.mark.parametrize(
    ("example", "settings", "alike"),
    [
        ("published/grpo_qwen2.5_7b", [], {"generator": {"generator": 5}}),
        ("published/dapo_qwen2.5_32b", [], {"generator": {"generator": 16}}),
        ("published/search_r1_qwen2.5_7b", [], {"agent": {"agent": 5}}),
        ("published/rubric_qwen3_30b_a3b", ["recipe.args.judgements=2"], {"generator": {"generator": 8, "judge": 2}}),
        ("published/pairwise_qwen3_8b", ["recipe.args.judge_iterations=1"], {
            "generator": {"generator": 8, "judge": 1}, "judge": {"judge": 8},
        }),
        ("published/self_play_r_zero_qwen3_4b", [], {"solver": {"proposer": 1, "solver": 10}}),
        ("published/tango_qwen2.5_7b", [], {
            "generator": {"generator": 5, "verifier": 1}, "verifier": {"generator": 1, "verifier": 5},
        }),
    ],
)  # fmt: skip
def test_recipes_say_which_samples_have_one_prompt(example, settings, alike):
    config = config_files.load(TrainConfig, [ROOT / f"examples/{example}.yaml"], settings)
    iterations = work_of_run(spec_of(config))
    assert {
        iteration.role: {draw.role: draw.per_prompt for draw in iteration.draws} for iteration in iterations
    } == alike


def test_an_engine_beside_which_nothing_fits_is_said_not_to_fit(capsys):
    main(["plan", str(ROOT / TANGO), "--cluster", "1x8xA100-40", "engine={kind: embedded}"])
    shown = capsys.readouterr().out
    assert re.search(r"embedded, in the trainer's GPUs\s+│[^│]*│ 8 +│ does not fit +│ as it is", shown), shown


LARGE = {
    "70b": (
        "16x8xH100", "Llama-3.1-70B", "{tp: 8, pp: 2, sequence_parallel: true}", "{kind: vllm, replicas: 4, tp: 8}"
    ),
    "235b": (
        "32x8xH100", "Qwen/Qwen3-235B-A22B", "{tp: 4, ep: 128, etp: 1, sequence_parallel: true}",
        "{kind: vllm, replicas: 4, tp: 16}",
    ),
    "671b": (
        "128x8xH100", "deepseek-ai/DeepSeek-V3", "{tp: 8, ep: 256, etp: 1, sequence_parallel: true}",
        "{kind: vllm, replicas: 8, tp: 32}",
    ),
    "1t": (
        "512x8xH100", "moe-1t", "{tp: 4, ep: 384, etp: 1, sequence_parallel: true}",
        "{kind: vllm, replicas: 20, tp: 64}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_models_are_planned(capsys, name):
    cluster, model, layout, engine = LARGE[name]
    settings = [*both("model.path", model), *both("layout", layout), *both("model.recompute", "full")]
    settings.append(f"engine={engine[:-1]}, {OWN_GPUS}}}")
    status, found = planned(capsys, "--cluster", cluster, *settings)
    assert status == 0, found["problems"]
    assert all(30 * GIB < role["peak"] < 79 * GIB for role in found["roles"])
    assert all(server["sequences"] >= 1 for server in found["servers"])
    assert 100 < found["cycle_s"] < 20000


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        ("2x8xH100", ["engine={kind: vllm, replicas: 2}"]),
        pytest.param("4x8xA100-80", [], marks=pytest.mark.matrix),
        pytest.param(
            "4x8xH200",
            [*both("model.path", "Qwen/Qwen3-30B-A3B"), *both("layout", "{tp: 2, sequence_parallel: true}"), KIND],
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_what_the_search_proposes_fits_and_passes_the_checks(cluster, settings):
    case = case_of(load(*settings), cluster, Duet())
    found = search.search(case)
    assert found and all(a.plan.cycle_s <= b.plan.cycle_s for a, b in pairwise(found))
    for one in found:
        assert not one.plan.problems
        assert one.case.passes()
        again = plans.make(case_of(load(*settings, *one.overrides), cluster, Duet()))
        assert again.cycle_s == pytest.approx(one.plan.cycle_s)
    asked = plans.make(case) if not settings else None
    assert asked is None or found[0].plan.cycle_s <= asked.cycle_s
    for name, role in found[0].case.roles.items():  # no larger micro-batch fits the best one
        assert role.micro_batch_tokens >= role.max_prompt_tokens + role.sampling.max_tokens
        larger = [tokens for tokens in search.MICRO_BATCHES if tokens > role.micro_batch_tokens]
        for tokens in larger:
            other = plans.make(found[0].case.with_role(name, micro_batch_tokens=tokens))
            assert other.problems or other.cycle_s >= found[0].plan.cycle_s


def test_what_does_not_fit_is_said_with_a_cure(capsys):
    status = main(
        [
            "plan",
            str(ROOT / TANGO),
            "--cluster",
            "4x8xA100-80",
            f"engine={{kind: vllm, replicas: 4, tp: 2, {OWN_GPUS}}}",
            *both("layout", "{tp: 1, sequence_parallel: false}"),
            *both("model.recompute", "full"),
            *both("sleep", "false"),
        ]
    )
    out = capsys.readouterr().out
    assert status == 1 and "does not fit" in out and re.search("fits? with", out), out
    alone = ["engine={kind: embedded}", *both("layout", "{tp: 1, sequence_parallel: false}")]
    status = main(["plan", str(ROOT / TANGO), "--cluster", "1x1xA100-40", *alone, "--search"])
    assert status == 1 and "nothing fits" in capsys.readouterr().out


def test_advice_names_the_bottleneck_and_what_would_pay(capsys):
    _, found = planned(capsys, "--cluster", "8x8xA100-80", f"engine={{kind: vllm, replicas: 2, tp: 2, {OWN_GPUS}}}")
    assert "rollout" in found["advice"][0] and any("replicas" in line and "less" in line for line in found["advice"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "32xA100"], "NODESxGPUSxDEVICE"),
        (["--cluster", "4x8xV100"], "not known; A100-40"),
        (["--cluster", "4x0xH100"], "NODESxGPUSxDEVICE"),
        (["--cluster", "3x1xH100", "engine={kind: embedded}"], "does not divide 3 ranks"),
        (["roles.generator.layout={tp: 8}", "--cluster", "4x8xH100"], "not divisible by tp = 8"),
        (
            ["roles.generator.layout={pp: 3}", "--cluster", "3x8xH100", "engine={kind: embedded}"],
            "not divisible by pp x vpp = 3",
        ),
        (["roles.generator.layout={ep: 2}"], "has no experts"),
        (["roles.generator.model.path=mine/of-my-own"], "--shape ROLE=FILE"),
        (["--shape", "gen=qwen2.5-7b"], "the roles are generator, verifier"),
        (["--fill", "0"], "above 0"),
        (["--fill", "judge=0.5"], "the roles are generator, verifier"),
        (["--fill", "verifier=much"], "'much' is not a number"),
        (["--draws", "generator=2"], "the form ITERATION.ROLE=NUMBER"),
        (["--draws", "generator.verifier=0"], "above 0"),
        ([f"engine={{kind: vllm, replicas: 16, tp: 2, {OWN_GPUS}}}", "--cluster", "4x8xH100"], "leave none"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_its_cure(capsys, arguments, says):
    assert main(["plan", str(ROOT / TANGO), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_shape_comes_from_a_file_and_experts_need_their_number(tmp_path, capsys):
    facts = {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 1000, "num_experts": 8,
        "moe_intermediate_size": 256,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        read_shape(str(file))
    file.write_text(json.dumps(facts | {"num_experts_per_tok": 2}))
    assert read_shape(str(tmp_path)).active == 2
    status, found = planned(
        capsys,
        "--shape",
        f"generator={file}",
        "engine={kind: vllm, replicas: 1, tp: 1}",
        "--cluster",
        "4x8xH100",
        *both("layout", "{tp: 1, sequence_parallel: false}"),
        *both("model.recompute", "full"),
    )
    assert status == 0 and found["roles"][0]["parameters"] == sum(
        map(prod, parameter_mapping.hf_shapes(read_shape(str(file)).sizes).values())
    )


def test_the_embedded_engine_holds_all_experts_of_a_model(capsys):
    """test_embedded_experts.py compares the number with what the engine allocates."""
    models = [*both("model.path", "Qwen/Qwen3-30B-A3B"), *both("layout", "{tp: 1, ep: 8, sequence_parallel: false}")]
    _, found = planned(capsys, "--cluster", "4x8xH100", "engine={kind: embedded}", *models)
    assert [role["embedded"] for role in found["roles"]] == [2 * 30_532_122_624] * 2


def test_a_long_warm_up_is_not_taken_for_the_middle_of_the_run():
    """40 warm-up cycles of one iteration stand before 33 cycles of ten."""
    config = load("recipe.args.generator_iterations=9")
    iterations = {iteration.role: iteration.times for iteration in work_of_run(spec_of(config))}
    assert iterations == {"generator": 9, "verifier": 1}


def test_lengths_and_counts_of_one_role_can_be_said():
    """Half of the solutions are verified, and verifications are a quarter of the longest; the verifier's iteration
    stays."""
    spec = spec_of(load())
    usual = {iteration.role: iteration for iteration in work_of_run(spec)}
    fills, draws = fills_of(spec.roles, ["verifier=0.25", "0.4"]), draws_of(spec.roles, ["generator.verifier=2.5"])
    said = {iteration.role: iteration for iteration in work_of_run(spec, fills=fills, draws=draws)}
    own, review = said["generator"].draws
    assert (own.samples, own.response) == (1280, pytest.approx(0.4 * 2048))
    assert (review.samples, review.response) == (640, pytest.approx(0.25 * 4096))
    assert [d.samples for d in said["verifier"].draws] == [d.samples for d in usual["verifier"].draws]
    assert said["verifier"].trained[0].response == pytest.approx(1024)


def test_a_recipe_that_does_not_say_what_it_draws_is_taken_to_draw_its_groups():
    class Plain(Unscored):
        def roles(self):
            return {"generator": RecipeRole(samples=7)}

        def schedule(self):
            return [[("generator",)]]

    [work] = work_of_run(spec_of(load(), Plain()))
    assert work.trained[0].samples == 7 * 256


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
def test_a_tandems_engine_holds_two_models_and_takes_twice_as_long(engine):
    alone = load("engine={kind: vllm, replicas: 2}" if engine == "vllm" else "engine={kind: embedded}")
    pair = replace(alone, roles=alone.roles | {"generator": replace(alone.roles["generator"], tandem=TandemConfig())})
    one, two = [], []
    for config, out in ((alone, one), (pair, two)):
        plan = plans.make(case_of(config, "4x8xA100-80", Duet()))
        generator, verifier = plan.roles
        out += [generator.embedded, generator.cache, verifier.embedded, verifier.cache]
        out += [server.weights for server in plan.servers]
        out += [
            plan.iterations[0].phases["rollout generator"],
            sum(s.sequences for s in plan.servers if s.role == "generator"),
        ]
    if engine == "vllm":
        assert [b / a if a else 1 for a, b in zip(one[4:6], two[4:6], strict=True)] == [2, 1]
        assert two[7] < one[7] / 2 and two[6] >= 2 * one[6], "less cache, for two"
    else:
        assert [b / a for a, b in zip(one[:5], two[:5], strict=True)] == pytest.approx([2, 2, 1, 1, 2])


def test_a_frozen_role_has_weights_alone():
    class Solo(Duet):
        def schedule(self):
            return [[("generator",)]]

    made = plans.make(case_of(load(), "4x8xA100-80", Solo()))
    generator, verifier = made.roles
    assert (
        generator.training.gradients > 0 == verifier.training.gradients
        and verifier.training.weights == generator.training.weights
    )


def test_planning_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from megatron_rl.main import main\n"
        f"sys.exit(main(['plan', '{TANGO}', '--cluster', '4x8xA100-80']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_published_runs_of_like_means_are_met_within_30_percent():
    sys.path[:0] = [str(ROOT / "benchmarks")]
    import plan_published

    rows = plan_published.rows()
    held = [row for row in rows if not row.other]
    assert len(held) >= 12 and sum(not row.fitted for row in held) >= 8
    for row in held:
        assert abs(row.ours / row.published - 1) < plan_published.WORST, row


def test_every_device_reaches_less_than_its_maker_says():
    for device in DEVICES.values():
        assert 0 < device.expert_share < device.dense_share < 1 and device.network < device.nvlink < device.hbm


@pytest.mark.multi
def test_memory_is_what_the_actor_allocates(tmp_path):
    """Parameters, gradients and optimizer agree within 5 %, and what autograd saves within 15 %, on every rank.

    benchmarks/plan_memory.py compares larger models.
    """
    sizes = {"hidden_size": 128, "vocab_size": 256}
    dense, experts, moved, sinks = (
        make_model(tmp_path / name, family, **sizes)
        for name, family in (("dense", "qwen2"), ("experts", "qwen3_moe"), ("moved", "olmo2"), ("sinks", "gpt_oss"))
    )
    together = {"tp": 2, "sequence_parallel": True}
    latent = make_model(tmp_path / "latent", "deepseek_v3", **sizes)  # a dense layer, and one with experts
    kinds = [
        (latent, {"pp": 2}, {}), (latent, together, {"recompute": "selective", "modules": ["mlp"]}),
        (dense, {}, {}), (dense, together, {}), (dense, {"tp": 2}, {"recompute": "full"}), (dense, {"pp": 2}, {}),
        (dense, {}, {"recompute": "selective"}),
        (dense, {"tp": 2}, {"recompute": "selective", "modules": ["mlp", "core_attn"]}),
        (experts, {}, {"recompute": "selective", "modules": ["moe"]}),
        (dense, {}, {"dtype": "bfloat16"}), (experts, {"ep": 2}, {}), (experts, together, {}),
        (moved, together, {}), (moved, {}, {"dtype": "bfloat16"}), (sinks, together | {"etp": 1}, {}),
        (dense, {}, {"prompt": 40, "group": 4, "micro": 112}), (latent, together, {"prompt": 40, "group": 4}),
        (dense, {}, {"lora": {"rank": 8}}), (dense, together, {"lora": {"rank": 4}, "dtype": "bfloat16"}),
    ]  # fmt: skip
    cases = [
        {"model": str(model), "layout": layout, "lengths": [64] * 8, "micro": 128, **kind}
        for model, layout, kind in kinds
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    answers = run_ranks(Path(__file__).parents[1] / "helpers" / "plan_worker.py", 2, tmp_path / "ranks", str(file))
    for number, case in enumerate(cases):
        own = [answer[number] for answer in answers]
        for part, bar in (("weights", 0.05), ("gradients", 0.05), ("optimizer", 0.05), ("activations", 0.15)):
            pairs = [(answer["expected"][part], answer["found"][part]) for answer in own]
            if part == "activations" and case["layout"].get("ep"):  # a router sends one rank more than the other
                pairs = [(sum(a for a, _ in pairs), sum(b for _, b in pairs))]
            assert all(abs(a / b - 1) < bar for a, b in pairs), (case, part, pairs)


def test_a_layout_without_ranks_is_refused():
    with pytest.raises(ConfigError, match="does not divide"):
        Parallel.of(Layout(tp=4), 6, experts=False)
