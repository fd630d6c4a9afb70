"""Plans of runs whose roles answer several times in an episode: what is read, written, waited for and held."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import Unscored, case_of, spec_of

from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.schema import ConfigError, TrainConfig, Use
from megatron_rl.main import main
from megatron_rl.models.shape import read_shape
from megatron_rl.planning import compute
from megatron_rl.planning import plan as plans
from megatron_rl.planning.compute import EngineSetup
from megatron_rl.planning.hardware import parse_cluster
from megatron_rl.planning.workload import Draw, _lengths, episodes_of, longest_context
from megatron_rl.training.iteration import RecipeRole

ROOT = Path(__file__).parents[3]
TANGO = str(ROOT / "examples/published/tango_qwen2.5_7b.yaml")
SHAPE, CLUSTER = read_shape("llama-3.1-8b"), parse_cluster("1x1xA100-80")
ENGINE = EngineSetup(replicas=1, tp=1, max_batch=512, kv_bytes=4e10)
# 100 tokens of a prompt, then three answers of 50, with 20 tokens of a tool before the second and the third
THREE = Draw(
    role="x", samples=8, prompt=100, response=50, longest=50, episode=EpisodeEstimate(answers=3, told=20)
)  # fmt: skip


def planned(*, episode: EpisodeEstimate, settings=("engine={kind: vllm, replicas: 2}",)):
    """The plan of the paper's run in which the generator alone is trained, 5 samples of each of 256 problems."""

    class Solo(Unscored):
        def roles(self):
            return {
                "generator": RecipeRole(samples=5, drawn={"generator": 5}, episode=episode),
                "verifier": RecipeRole(trained=False)
            }  # fmt: skip

        def schedule(self):
            return [[("generator",)]]

    config = config_files.load(TrainConfig, [Path(TANGO)], list(settings))
    return config.roles["generator"], plans.make(case_of(config, "4x8xA100-80", Solo()))


def test_lengths_of_a_sample_that_has_several_answers():
    assert [THREE.context(answer) for answer in range(3)] == [100, 100 + 50 + 20, 100 + 50 + 20 + 50 + 20]
    assert THREE.written == 3 * 50 and THREE.length == 100 + 3 * 50 + 2 * 20
    role, _ = planned(episode=EpisodeEstimate())
    role = replace(role, max_prompt_tokens=200, sampling=replace(role.sampling, max_tokens=80))
    assert longest_context(role, THREE.episode) == 200 + 3 * 80 + 2 * 20
    assert longest_context(role, EpisodeEstimate()) == 280


def reading(*places: range) -> float:
    """Operations of reading the tokens at these places, by loops: matrix products, and attention to all before."""
    dense = sum(compute.forward_flops(SHAPE, 0)[:2])
    attention = 4 * SHAPE.sizes.num_layers * SHAPE.sizes.heads * SHAPE.sizes.head_dim  # scores and values, 2 each
    return sum(dense + attention * (place + 0.5) for own in places for place in own)


@pytest.mark.parametrize(
    ("setup", "read"),
    [
        (ENGINE, [range(100), range(150, 170), range(220, 240)]),  # the prompt, and each tool's words once
        (replace(ENGINE, keeps_prefix=False), [range(100), range(170), range(240)]),
        # a cache for 7 of the 8 samples: each one loses its place before it goes on
        (replace(ENGINE, kv_bytes=7.5 * 290 * compute.kv_bytes(SHAPE, 2)), [range(100), range(170), range(240)]),
    ],
)
def test_what_stands_before_an_answer_is_read_once_where_it_is_kept_and_else_each_time(setup, read):
    found = compute.rollout_cost(SHAPE, setup, CLUSTER, THREE, width=2)
    # 150 tokens are decoded one by one; before the k-th of an answer stand its context and k, in the mean of all:
    places = [context + k + 0.5 for context in (100, 170, 240) for k in range(50)]
    context = sum(places) / len(places)
    step = compute.decode_step_seconds(SHAPE, setup, CLUSTER, rows=found.rows, context=context, width=2)
    device = CLUSTER.device
    prefill = 8 * reading(*read) / (device.flops * device.dense_share * compute.PARTIAL)
    assert found.seconds == pytest.approx(prefill + 8 / found.rows * 150 * step, rel=1e-9)
    assert found.kept == (len(read[1]) == 20) and found.rows == pytest.approx(8 if setup.kv_bytes == 4e10 else 7.5)


def test_the_prompt_of_a_group_is_read_once_and_its_cache_is_shared():
    """Four samples of each prompt: a quarter of the prompts is read, and room for seven whole samples holds eight."""
    draw = replace(THREE, per_prompt=4)

    def seconds(setup, draw):
        return compute.rollout_cost(SHAPE, setup, CLUSTER, draw, width=2).seconds

    rate = CLUSTER.device.flops * CLUSTER.device.dense_share * compute.PARTIAL
    spared = seconds(ENGINE, THREE) - seconds(ENGINE, draw)
    assert spared == pytest.approx(8 * 3 / 4 * reading(range(100)) / rate, rel=1e-6)
    forgetful = replace(ENGINE, shares_prompt=False)
    assert seconds(forgetful, draw) == seconds(ENGINE, THREE)
    tight = replace(ENGINE, kv_bytes=7.5 * 290 * compute.kv_bytes(SHAPE, 2))
    assert compute.rollout_cost(SHAPE, tight, CLUSTER, draw, width=2).rows == 8
    assert compute.rollout_cost(SHAPE, tight, CLUSTER, THREE, width=2).rows == pytest.approx(7.5)


def test_a_role_that_answers_once_is_planned_as_before():
    draw = Draw(role="", samples=64, prompt=200, response=300, longest=800)
    found = compute.rollout_cost(SHAPE, ENGINE, CLUSTER, draw, width=2)

    def step(rows, at):
        return compute.decode_step_seconds(SHAPE, ENGINE, CLUSTER, rows=rows, context=at, width=2)

    device = CLUSTER.device
    prefill = 64 * reading(range(200)) / (device.flops * device.dense_share * compute.PARTIAL)
    assert found.seconds == pytest.approx(prefill + 300 * step(64, 200 + 150) + 500 * step(8, 200 + 800), rel=1e-9)
    assert compute.tool_seconds(replace(draw, episode=EpisodeEstimate()), 10.0) == 0.0


@pytest.mark.parametrize(
    ("at_once", "alone", "seconds"),
    [
        (64, 10.0, 24.0),  # 256 samples, each with 3 calls of 2 s: 1536 s, 64 at a time
        (64, 20.0, 26.0),  # the samples are written beside each other, in 20 s, and each waits 6 s for its own calls
        (512, 10.0, 16.0),  # more calls at once than samples do not shorten a sample's own
    ],
)
def test_tools_take_the_time_of_all_calls_or_of_one_samples_own_way(at_once, alone, seconds):
    episode = EpisodeEstimate(answers=4, tool_s=2.0, calls_at_once=at_once)
    draw = Draw(role="", samples=256, prompt=1, response=1, longest=1, episode=episode)
    assert compute.tool_seconds(draw, alone) == seconds


def test_tools_hide_behind_generation_and_what_is_longer_is_shown():
    quick, slow = EpisodeEstimate(answers=4, told=100, tool_s=1e-6), EpisodeEstimate(answers=4, told=100, tool_s=600.0)
    _, none = planned(episode=replace(quick, tool_s=0.0))
    _, hidden = planned(episode=quick)
    _, waits = planned(episode=slow)
    name = "rollout generator, waiting for tools"
    generating = none.phases["rollout generator"]
    assert name not in none.phases and none.iterations[0].rows["generator"] < 1280 / 2, "several waves: others go on"
    assert hidden.phases == none.phases
    # 1280 samples x 3 calls x 600 s, 64 at once; generation runs beside them
    assert waits.phases["rollout generator"] == pytest.approx(generating)
    assert waits.phases[name] == pytest.approx(1280 * 3 * 600 / 64 - generating)
    assert waits.cycle_s == pytest.approx(none.cycle_s + waits.phases[name])
    [said] = waits.iterations[0].episodes
    assert said.waiting == pytest.approx(waits.phases[name]) and "s longer than generation takes" in str(said)
    assert "hidden by generation" in str(hidden.iterations[0].episodes[0])


def test_memory_holds_the_longest_sample_and_training_reads_what_was_told():
    for settings in (["engine={kind: vllm, replicas: 2}"], ["engine={kind: embedded}"]):
        role, one = planned(episode=EpisodeEstimate(), settings=settings)
        _, four = planned(episode=EpisodeEstimate(answers=4, told=300), settings=settings)
        prompt, answer = role.max_prompt_tokens, role.sampling.max_tokens
        ratio = (prompt + 4 * answer + 3 * 300) / (prompt + answer)
        if one.servers:
            assert one.servers[0].sequences / four.servers[0].sequences == pytest.approx(ratio)
            assert one.servers[1] == four.servers[1], "the verifier answers once"
        else:
            assert four.roles[0].cache / one.roles[0].cache == pytest.approx(ratio)
        assert four.iterations[0].trained == 1280 * (prompt / 2 + 4 * answer / 2 + 3 * 300)
        assert four.iterations[0].generated == 1280 * 4 * answer / 2


def test_an_engine_that_is_told_to_keep_nothing_reads_everything_again():
    episode = EpisodeEstimate(answers=2)
    words = {"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache"}
    own = "replicas: 8, tp: 1, colocate: false, memory_share: 0.9"
    for kind, word in words.items():
        _, plain = planned(episode=episode, settings=[f"engine={{kind: {kind}, {own}}}"])
        told = f"engine={{kind: {kind}, {own}, args: ['{word}']}}"
        _, without = planned(episode=episode, settings=[told])
        assert plain.iterations[0].episodes[0].kept and not without.iterations[0].episodes[0].kept
    _, embedded = planned(episode=episode, settings=["engine={kind: embedded}"])
    assert not embedded.iterations[0].episodes[0].kept
    assert "reads again all that stands before it" in str(embedded.iterations[0].episodes[0])


def test_the_command_takes_what_is_known_of_episodes_and_says_what_it_assumed(capsys):
    settings = ["answers=4", "told=300", "tool_s=2.5", "calls_at_once=16"]
    words = [word for one in settings for word in ("--episode", f"generator.{one}")]
    run_engines = [
        "engine={kind: vllm, replicas: 2}",
        "--cluster",
        "4x8xA100-80",
        "roles.generator.micro_batch_tokens=8192",
    ]
    main(["plan", TANGO, *run_engines, *words])
    said = " ".join(capsys.readouterr().out.split())
    role, _ = planned(episode=EpisodeEstimate())
    longest = role.max_prompt_tokens + 4 * role.sampling.max_tokens + 3 * 300
    for part in (
        "note in generator's iteration generator is taken to answer 4 times in an episode, "
        f"in {role.sampling.max_tokens // 2} tokens each;",
        f"between two answers it is told 300 tokens, and its longest sample has {longest:,};",
        "tools take 2.5 s between two answers, 16 calls at once, beside the generation of other episodes",
        "a sample of more than 8,192 tokens would stop the run: raise roles.generator.micro_batch_tokens",
    ):
        assert part in said, (part, said)
    assert "verifier is taken to answer" not in said
    main(["plan", TANGO, *run_engines, *words, "--json"])
    [told] = json.loads(capsys.readouterr().out)["iterations"][0]["episodes"]
    assert told["estimate"] == {"answers": 4, "told": 300, "tool_s": 2.5, "calls_at_once": 16, "bounded": False}


def test_settings_stand_over_what_the_recipe_says():
    class Talk:
        def roles(self):
            return {
                "generator": RecipeRole(episode=EpisodeEstimate(answers=4, told=9)),
                "verifier": RecipeRole(trained=False),
            }

    config = config_files.load(TrainConfig, [Path(TANGO)], [])
    spec = spec_of(config, Talk())
    found = episodes_of(spec.recipe, spec.roles, ["generator.told=20", "generator.tool_s=1", "verifier.answers=2"])
    assert found == {
        "generator": EpisodeEstimate(answers=4, told=20, tool_s=1.0), "verifier": EpisodeEstimate(answers=2)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("judge.answers=2", "it has the form ROLE.name=value; the roles are generator, verifier"),
        ("answers=2", "it has the form ROLE.name=value"),
        (
            "generator.iterations=2",
            "iterations: unknown key; known here: answers, told, tool_s, calls_at_once, bounded",
        ),
        ("generator.answers=0", "answers = 0"),
        ("generator.tool_s=-1", "tool_s = -1"),
        ("generator.told=5", "told = 5 with answers = 1: nothing follows the answer"),
    ],
)
def test_episodes_that_cannot_be_are_refused(setting, says):
    config = config_files.load(TrainConfig, [Path(TANGO)], [])
    with pytest.raises(ConfigError) as error:
        episodes_of(spec_of(config).recipe, config.roles, [setting])
    assert f"--episode {setting}: " in str(error.value) or "--episode of generator: " in str(error.value)
    assert says in str(error.value)


TOOLS = {
    "target": "megatron_rl.environments.tool_task:ToolTask",
    "args": {
        "tools": [{"target": "megatron_rl.contrib.calculator:Calculator"}], "template": "calculator_tags",
        "max_calls": 4,
    },
}  # fmt: skip


POKER = {"target": "megatron_rl.contrib.kuhn_poker:KuhnPoker"}


def agents(**args):
    use = Use(target="megatron_rl.recipes.agents:Agents", args={"updates": 1, "environment": TOOLS, **args})
    return plugins.build(use)


def test_agents_say_of_their_episodes_what_the_environment_and_the_settings_know():
    part = agents(told=60, tool_s=0.5, workers=8).roles()["agent"]
    assert part.episode == EpisodeEstimate(answers=5, told=60, tool_s=0.5, calls_at_once=8, bounded=True)
    [one] = {part.episode for part in agents(environment=POKER, agents={"first": 1, "second": 1}).roles().values()}
    assert one == EpisodeEstimate(calls_at_once=64, bounded=True), "it does not say how often an agent answers"
    pytest.importorskip("gymnasium")
    lake = {"target": "megatron_rl.contrib.gymnasium_text:GymnasiumText", "args": {"id": "FrozenLake-v1"}}
    assert agents(environment=lake).roles()["agent"].episode.answers == 20


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tool_s": -1.0}, "tool_s = -1.0: give a value greater than or equal to 0"),
        (
            {"told": 9, "agents": {"first": 1, "second": 1}, "environment": POKER},
            "recipe.args.told = 9 is between two answers of an agent, and the environment",
        ),
    ],
)
def test_what_stands_between_answers_needs_two_of_them(args, says):
    with pytest.raises(ConfigError) as error:
        agents(**args)
    assert says in str(error.value)


def test_the_plan_of_a_run_of_agents_takes_what_these_know_unless_it_is_told_otherwise(tmp_path, capsys):
    args = {"updates": 3, "environment": TOOLS, "told": 40, "tool_s": 0.5}
    run = {
        "recipe": {"target": "megatron_rl.recipes.agents:Agents", "args": args},
        "roles": {
            "agent": {"model": {"path": "llama-3.1-8b"}, "max_prompt_tokens": 2000, "sampling": {"max_tokens": 400}}
        },
        "data": {"path": "questions.jsonl"}, "engine": {"kind": "vllm", "replicas": 2},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    command = ["plan", str(tmp_path / "run.json"), "--cluster", "4x8xA100-80", "--json"]

    def estimate(*words):
        main([*command, *words])
        iteration = json.loads(capsys.readouterr().out)["iterations"][0]
        return iteration["episodes"][0]["estimate"], iteration["episodes"][0]["longest"], iteration

    known, longest, iteration = estimate()
    assert known == {"answers": 5, "told": 40, "tool_s": 0.5, "calls_at_once": 64, "bounded": True}
    assert longest == 2000 + 400, "max_prompt_tokens holds for all that stands before an answer"
    # five parts of half of 2,000 tokens: a prompt of 200, and four answers of 160 with 40 told after each; then another
    assert iteration["trained"] == 256 * 8 * (5 * 200 + 160) and iteration["generated"] == 256 * 8 * 5 * 160
    told, longest, _ = estimate("--episode", "agent.answers=2", "--episode", "agent.told=100")
    assert (told["answers"], told["told"], told["tool_s"], longest) == (2, 100, 0.5, 2400)


def test_a_bounded_episode_fits_in_what_may_stand_before_an_answer():
    role, _ = planned(episode=EpisodeEstimate())
    role = replace(role, max_prompt_tokens=1000, sampling=replace(role.sampling, max_tokens=100))
    for answers, told in ((1, 0), (2, 10), (5, 50), (20, 0), (20, 40)):
        episode = EpisodeEstimate(answers=answers, told=told, bounded=True)
        prompt, answer, longest = _lengths(role, episode, 0.5)
        before = prompt + (answers - 1) * (answer + told)
        assert before == pytest.approx(500) or (answer == 1 and prompt == 1), (answers, before)
        assert 1 <= answer <= 50 and answer <= longest + 1 <= 101
        assert prompt + answers * longest + (answers - 1) * told <= max(1100, before + answer)
