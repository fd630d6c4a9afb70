"""Every shipped config loads, checks out, and builds its recipe; the published runs have the paper's numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import specs as config_checks
from example_home import make_home

from megatron_rl.algorithms.estimators import word_of
from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config import files as config_files
from megatron_rl.config import plugins
from megatron_rl.config import schema as config
from megatron_rl.config.evaluation import sets_of
from megatron_rl.config.schema import CorrectionConfig, EvalConfig, GenerateConfig, SftConfig, TandemConfig, TrainConfig
from megatron_rl.contrib import ssrl_reward
from megatron_rl.contrib.evolve import Evolve
from megatron_rl.contrib.self_play import SelfPlay
from megatron_rl.data.benchmarks import benchmark
from megatron_rl.recipes.tango import Tango
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.training.preflight import PreflightFailure, check_reward
from megatron_rl.types import Prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
GENERATE = ["published/generate_sft_llama3.1_70b"]
FOUND = sorted(str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.yaml"))
SFT = [name for name in FOUND if re.search(r"/(sft\b|sft_|reward$)", name)]
EVAL = [name for name in FOUND if "/eval_" in name]
TRAIN = [name for name in FOUND if name not in {*GENERATE, *SFT, *EVAL}]


def load(schema, name):
    return config_files.load(schema, [EXAMPLES / f"{name}.yaml"])


def test_each_example_has_a_command():
    assert len(SFT) >= 13 and len(EVAL) >= 2 and set(GENERATE) <= set(FOUND) and len(TRAIN) > 60


@pytest.mark.parametrize("name", TRAIN)
def test_training_examples_are_valid(name, tmp_path, monkeypatch):
    monkeypatch.chdir(make_home(tmp_path))
    if "/search" in name:
        pytest.importorskip("bm25s")
    found = load(TrainConfig, name)
    config_checks.check(found, max(32, 8 * found.job.nodes))
    recipe = plugins.build(found.recipe)
    config_checks.check_recipe(found, recipe)
    assert set(recipe.roles()) == set(found.roles) and len(recipe.schedule()) > 0
    problem = {"question": "What is 2 + 3?", "answer": "5", "response": "It is 5.", "principle": "It is right."}
    assert ("What is 2 + 3?" in recipe.prompt(problem)) == ("r_zero" not in name), "its challenger sees no problem"


@pytest.mark.parametrize("name", SFT)
def test_sft_examples_are_valid(name):
    config_checks.check(load(SftConfig, name), 32)


@pytest.mark.parametrize("name", EVAL)
def test_eval_examples_are_valid(name):
    config = load(EvalConfig, name)
    config_checks.check(config, 8)
    assert all(benchmark(own.name).template and not benchmark(own.name).judged for own in sets_of(config.sets))


@pytest.mark.parametrize("name", [*TRAIN, *EVAL, *GENERATE])
def test_models_of_7b_and_more_have_servers(name):
    """The evaluation of a 7B model was written by the embedded engine, which holds the model on every rank."""
    text = (EXAMPLES / f"{name}.yaml").read_text()
    paths = " ".join(re.findall(r"path: *([^\s,}]+)", text))
    if max(map(float, re.findall(r"(\d+(?:\.\d+)?)[bB]\b", paths.replace("_", " "))), default=0.0) < 7:
        return
    schema = EvalConfig if name in EVAL else TrainConfig if name in TRAIN else GenerateConfig
    assert load(schema, name).engine.kind != "embedded"


@pytest.mark.parametrize("name", [name for name in (*TRAIN, *SFT) if re.search(r"_[78]b$", name)])
def test_models_of_7b_and_8b_train_without_full_recomputation(name):
    """It costs a third of an update, and a GPU of 80 GB holds what these keep; tensor ranks share activations."""
    config = load(SftConfig if name in SFT else TrainConfig, name)
    for part in [config] if name in SFT else config.roles.values():
        assert part.model.recompute != "full"
        assert part.layout.tp == 1 or part.layout.sequence_parallel


def test_generate_example_is_valid():
    """The numbers of the release's scripts/run_sft_data_generation.sh and data_preprocess/split_parquet.py."""
    config = load(GenerateConfig, GENERATE[0])
    config_checks.check(config, 1)
    assert (config.max_prompt_tokens, config.validation_share, config.keep_truncated, config.chat) == (
        1024,
        0.1,
        True,
        True,
    )
    assert (config.sampling.temperature, config.sampling.top_p, config.n, config.sampling.max_tokens) == (
        0.1,
        0.5,
        1,
        3072,
    )


@pytest.mark.parametrize(
    ("name", "estimator", "alpha_start", "kl", "entropy_coef"),
    [
        ("published/tango_qwen2.5_7b", "grpo", 0.1, "k3", 0.001),
        ("published/tango_llama3.1_8b", "grpo", 0.1, "k3", 0.001),
        ("published/tango_rloo_qwen2.5_7b", "rloo", 0.1, "k3", 0.001),
        ("published/tango_reinforce_pp_qwen2.5_7b", "reinforce_pp", 0.5, "k2", 0.0),
    ],
)
def test_published_runs_have_the_papers_numbers(name, estimator, alpha_start, kl, entropy_coef):
    """The numbers of the release's scripts/run_rl_tango.sh, with verl's defaults where it says nothing."""
    config = load(TrainConfig, name)
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, Tango)
    iterations = [role for cycle in recipe.schedule() for roles in cycle for role in roles]
    assert len(iterations) == 440 and iterations.count("generator") == 300 and iterations[:40] == ["verifier"] * 40
    assert iterations[40:44] == ["generator"] * 3 + ["verifier"]
    assert (recipe.alpha_start, recipe.alpha_min, recipe.alpha_schedule) == (alpha_start, 1e-3, "exponential")
    assert recipe.estimator == estimator
    assert (recipe.group_size, recipe.verifications, recipe.format_weight, recipe.class_weight_decay) == (
        5,
        5,
        0.8,
        0.8,
    )
    assert config.run.prompts_per_iteration == 256 and config.run.train_without_signal
    for role, limit in (("generator", 2048), ("verifier", 4096)):
        settings = config.roles[role]
        assert (settings.max_prompt_tokens, settings.sampling.max_tokens) == (limit, limit)
        assert (settings.optimizer.lr, settings.optimizer.warmup_steps, settings.optimizer.decay) == (
            1e-6,
            0,
            "constant",
        )
        assert (settings.optimizer.clip_grad, settings.samples_per_optimizer_step) == (1.0, None)
        loss = settings.loss
        assert (loss.clip_low, loss.clip_high, loss.kl_coef) == (0.2, 0.2, 0.001)
        assert (loss.kl, loss.entropy_coef) == (kl, entropy_coef)
        assert (settings.optimizer.betas, settings.optimizer.decay_norms) == ((0.9, 0.999), True)
        assert (settings.sampling.temperature, settings.sampling.top_p, settings.sampling.top_k) == (1.0, 1.0, 0)


def test_the_tandem_has_the_papers_numbers():
    config = load(TrainConfig, "published/tandem_qwen3_4b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert role.tandem == TandemConfig(junior=None, strategy="word", p=0.5, max_gap=32)
    assert (role.optimizer.lr, role.loss.clip_low, role.loss.clip_high, role.loss.kl_coef, role.loss.entropy_coef) == (
        1e-6,
        0.2,
        0.2,
        0,
        0,
    )
    assert (role.sampling.temperature, role.sampling.max_tokens, role.max_prompt_tokens) == (0.6, 3000, 1024)
    assert (config.run.prompts_per_iteration, recipe.group_size, role.samples_per_optimizer_step) == (16, 8, 8 * 8)


def test_dapo_has_the_papers_numbers():
    """Section 4.1 of the paper; dual clip and weight decay of verl's script. verl's outcomes are 1 and -1: a penalty of
    1 there is one of 0.5 here."""
    config = load(TrainConfig, "published/dapo_qwen2.5_32b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (role.loss.clip_low, role.loss.clip_high, role.loss.kl_coef, role.loss.aggregation) == (
        0.2,
        0.28,
        0,
        "token_mean",
    )
    assert (role.optimizer.lr, role.optimizer.warmup_steps, role.samples_per_optimizer_step) == (1e-6, 20 * 16, 512)
    assert (config.run.prompts_per_iteration, recipe.group_size, recipe.estimator) == (512, 16, "grpo")
    assert config.run.prompts_per_iteration * recipe.dynamic_sampling.oversampling == 1536
    assert recipe.dynamic_sampling.rounds == 10
    assert (role.loss.objective_args, role.optimizer.weight_decay) == ({"dual_clip": 10.0}, 0.1)
    assert (role.sampling.max_tokens, recipe.overlong.cache, recipe.overlong.penalty) == (20480, 4096, 0.5)
    assert recipe.overlong.reward(20480 - 4096, 20480) == 0.0 and recipe.overlong.reward(20480, 20480) == -0.5


def test_scalerl_has_the_papers_choices():
    """Sections 3 and 4 and appendix A.3 of the paper."""
    config = load(TrainConfig, "published/scalerl_qwen3_8b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (role.loss.objective, role.loss.objective_args, role.loss.aggregation) == (
        "cispo",
        {"cap": 5.0},
        "prompt_mean",
    )
    assert (recipe.group_size, recipe.estimator, recipe.curriculum.retire_at) == (16, "batch", 0.9)
    assert recipe.dynamic_sampling.rounds == 1 and recipe.dynamic_sampling.oversampling == 1
    assert config.rollouts.max_staleness == 8 and role.loss.kl_coef == 0
    assert role.loss.correction == CorrectionConfig(kind="truncate", high=5.0)
    optimizer = role.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay, optimizer.warmup_steps) == (5e-7, 1e-15, 0.01, 100)
    assert (config.run.prompts_per_iteration, role.sampling.max_tokens) == (48, 14336)


@pytest.mark.parametrize(
    ("name", "prompts", "samples", "per_step", "tokens", "estimator", "objective", "aggregation"),
    [
        ("dr_grpo", 128, 8, None, 3000, "dr_grpo", "clipped", "constant"),
        ("lite_ppo", 1024, 8, 2048, 3072, "batch", "clipped", "token_mean"),
        ("gmpo", 1024, 5, 256 * 5, 1024, "grpo", "gmpo", "sequence_mean"),
        ("w_reinforce", 1024, 8, 256 * 8, 3072, "w_reinforce", "clipped", "token_mean"),
        ("rover", 128, 8, 32 * 8, 8192, "grpo", "rover", "token_mean"),
        ("ghpo", 112, 8, None, 2048, "grpo", "clipped", "token_mean"),
        ("opmd", 960, 8, 96 * 8, 1024, "opmd", "reinforce", "token_mean"),
        ("asymre", 1920, 8, 96 * 8, 1024, "asymre", "reinforce", "token_mean"),
        ("gspo", 256, 16, 32 * 16, 8192, "grpo", "gspo", "sequence_mean"),
        ("sapo", 256, 16, 32 * 16, 8192, "grpo", "sapo", "sequence_mean"),
        ("dppo", 256, 16, 32 * 16, 8192, "dr_grpo", "dppo_tv", "constant"),
        ("vespo", 2048, 8, 256 * 8, 15360, "grpo", "vespo", "token_mean"),
    ],
)
def test_examples_of_methods_have_the_released_numbers(
    name, prompts, samples, per_step, tokens, estimator, objective, aggregation
):
    """The scripts that each file names: problems, samples of each, samples in an optimizer step, longest answer."""
    config = load(TrainConfig, f"published/methods/{name}")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (config.run.prompts_per_iteration, recipe.group_size, role.sampling.max_tokens) == (prompts, samples, tokens)
    assert (role.samples_per_optimizer_step, word_of(recipe.estimator)) == (per_step, estimator)
    assert (role.loss.objective, role.loss.aggregation) == (objective, aggregation)
    assert (role.optimizer.lr, role.loss.kl_coef) == {"opmd": (2e-6, 0.001), "asymre": (2e-6, 0.0)}.get(name, (1e-6, 0))
    assert "advantages" in PolicyLoss(role.loss).needs  # its arguments are those that the objective takes


def test_examples_of_methods_have_the_released_arguments():
    loss = {
        name: load(TrainConfig, f"published/methods/{name}").roles["generator"].loss
        for name in ("gmpo", "opmd", "asymre")
    }
    assert loss["gmpo"].objective_args == {"clip_low": 0.4, "clip_high": 0.4}
    assert (loss["opmd"].objective_args["tau"], loss["asymre"].objective_args["tau"]) == (4.0, 0.0)
    recipe = {
        name: load(TrainConfig, f"published/methods/{name}").recipe.args for name in ("w_reinforce", "asymre", "ghpo")
    }
    assert recipe["w_reinforce"]["estimator"]["args"] == {"positive_weight": 0.1}
    assert recipe["asymre"]["estimator"]["args"] == {"baseline_shift": -0.1}
    assert recipe["ghpo"]["hints"]["shares"] == [0.25, 0.5, 0.75]


def test_ssrl_has_the_released_scripts_numbers():
    config = load(TrainConfig, "published/ssrl_llama3.2_3b")
    role, recipe = config.roles["generator"], plugins.build(config.recipe)
    assert (config.run.prompts_per_iteration, recipe.group_size, role.samples_per_optimizer_step) == (256, 5, None)
    assert (role.loss.kl, role.loss.kl_coef, role.loss.entropy_coef, role.optimizer.lr) == ("k3", 0.001, 0.0, 1e-6)
    assert (role.max_prompt_tokens, role.sampling.max_tokens) == (1024, 4096)
    right = config.reward.answer_format.replace("{answer}", "5")
    assert ssrl_reward.grade(right, {"answer": "5"}) == pytest.approx(0.95), (
        "the preflight before training takes it for right"
    )


@pytest.mark.parametrize("name", ["published/evolve_qwen2.5_3b", "published/evolve_three_qwen2.5_3b"])
def test_multi_agent_evolve_has_the_released_numbers(name):
    """scripts/selfplay/mae.sh and configs/azr_ppo_trainer_general.yaml of ulab-uiuc/Multi-agent-evolve d71c00b."""
    config = load(TrainConfig, name)
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, Evolve)
    assert (recipe.proposals, recipe.answers, recipe.judgements, recipe.practice) == (1, 5, 5, "pool")
    assert (recipe.reference_share, recipe.references, recipe.least_quality) == (0.5, 1, 0.7)
    assert (recipe.estimator, config.run.prompts_per_iteration) == ("reinforce_pp", 128)
    shared = [role.same_as for role in config.roles.values()]
    assert shared == ([None, None, None] if "three" in name else [None, "proposer", "proposer"])
    for role in config.roles.values():
        assert role.model.path == "Qwen/Qwen2.5-3B-Instruct" and role.samples_per_optimizer_step == 64
        assert (role.max_prompt_tokens, role.sampling.max_tokens, role.sampling.temperature) == (8192, 8192, 1.0)
        optimizer, loss = role.optimizer, role.loss
        assert (optimizer.lr, optimizer.decay, optimizer.weight_decay, optimizer.clip_grad) == (1e-6, "constant", 0, 1)
        assert (loss.kl_coef, loss.clip_low, loss.clip_high, loss.entropy_coef) == (0, 0.2, 0.28, 0.001)


def test_r_zero_has_the_released_numbers():
    """scripts/main.sh, questioner_train_penalty.sh, solver_train.sh and examples/config.yaml of Chengsong-Huang/R-Zero
    5699329; the clips are EasyR1's defaults (verl/workers/actor/config.py)."""
    config = load(TrainConfig, "published/self_play_r_zero_qwen3_4b")
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, SelfPlay)
    steps = [iteration for cycle in recipe.schedule() for iteration in cycle]
    assert steps == ([("proposer",)] * 5 + [("solver",)] * 15) * 5
    assert (config.run.prompts_per_iteration, recipe.proposals, recipe.answers) == (512, 4, 10)
    assert (recipe.aim, recipe.unparseable, recipe.cluster_distance, recipe.key) == ("even", -1.0, 0.5, "majority")
    assert (recipe.least_accuracy, recipe.most_accuracy) == (0.3, 0.8)
    assert (recipe.proposer_estimator, recipe.estimator, recipe.rule) == ("grpo", "grpo", None)
    for name, samples in (("proposer", 16 * 4), ("solver", 128 * 5)):
        role = config.roles[name]
        assert role.model.path == "Qwen/Qwen3-4B-Base" and role.samples_per_optimizer_step == samples
        assert (role.max_prompt_tokens, role.sampling.max_tokens) == (2048, 4096)
        assert (role.sampling.temperature, role.sampling.top_p) == (1.0, 0.99)
        optimizer, loss = role.optimizer, role.loss
        assert (optimizer.lr, optimizer.weight_decay, optimizer.warmup_steps, optimizer.clip_grad) == (1e-6, 0.01, 0, 1)
        assert (loss.clip_low, loss.clip_high, loss.objective_args) == (0.2, 0.3, {"dual_clip": 3.0})
        assert (loss.kl, loss.kl_coef, loss.entropy_coef, loss.aggregation) == ("k3", 0.01, 0.0, "token_mean")


def test_search_self_play_has_the_released_numbers():
    """examples/train_ssp.sh of Alibaba-Quark/SSP b4797e1, without what belongs to the search."""
    config = load(TrainConfig, "published/self_play_ssp_qwen2.5_7b")
    recipe = plugins.build(config.recipe)
    assert isinstance(recipe, SelfPlay) and recipe.schedule()[0] == [("proposer", "solver")]
    assert (config.run.prompts_per_iteration, recipe.proposals, recipe.answers) == (256, 1, 5)
    assert (recipe.aim, recipe.unparseable, recipe.key, recipe.cluster_distance) == ("hard", 0.0, "proposed", 0.0)
    assert (recipe.proposer_estimator, recipe.estimator) == ("reinforce", "grpo")
    proposer = config.roles["proposer"]
    assert config.roles["solver"].same_as == "proposer" and proposer.samples_per_optimizer_step == 256 * (1 + 5) // 2
    for role in config.roles.values():
        assert (role.max_prompt_tokens, role.sampling.max_tokens, role.sampling.temperature) == (4096, 8192, 1.0)
    assert (proposer.optimizer.lr, proposer.optimizer.warmup_steps) == (1e-6, 5)
    loss = proposer.loss
    assert (loss.clip_low, loss.clip_high, loss.kl, loss.kl_coef, loss.entropy_coef) == (0.2, 0.285, "k3", 0.01, 0.0)


def test_search_r1_has_the_released_numbers():
    """scripts/nq_hotpotqa/v0.2/train_grpo.sh of PeterGriffinJin/Search-R1 a14dc3a; its total of 1,005 updates has 0.285
    of warm-up, and its mini-batches are of conversations."""
    config = load(TrainConfig, "published/search_r1_qwen2.5_7b")
    role, args = config.roles["agent"], config.recipe.args
    samples = config.run.prompts_per_iteration * args["group_size"]
    assert (config.run.prompts_per_iteration, args["group_size"], args["updates"]) == (512, 5, 1005)
    assert (role.samples_per_optimizer_step, role.optimizer.warmup_steps) == (256, int(0.285 * 1005) * samples // 256)
    assert (role.optimizer.lr, role.optimizer.weight_decay, role.optimizer.clip_grad) == (1e-6, 0.01, 1.0)
    loss = role.loss
    assert (loss.clip_low, loss.clip_high, loss.kl, loss.kl_coef, loss.entropy_coef) == (0.2, 0.2, "k3", 0.001, 0.001)
    assert (role.max_prompt_tokens, role.sampling.max_tokens, role.sampling.temperature) == (4096, 500, 1.0)
    world = args["environment"]["args"]
    assert (world["max_calls"], world["tools"][0]["args"]["top_k"]) == (4, 3)
    assert world["reminder"].endswith(" the answer between <answer> and </answer>. I try again.\n")


def test_retool_has_the_released_numbers():
    """recipe/retool/run_qwen2.5_32b_dapo.sh of volcengine/verl b16865f; the paper's tags."""
    config = load(TrainConfig, "published/retool_qwen2.5_32b")
    role, args = config.roles["agent"], config.recipe.args
    assert (config.run.prompts_per_iteration, args["group_size"], args["estimator"]) == (512, 16, "grpo")
    assert (role.samples_per_optimizer_step, role.optimizer.lr, role.optimizer.warmup_steps) == (64 * 16, 1e-6, 0)
    loss = role.loss
    assert (loss.clip_low, loss.clip_high, loss.objective_args) == (0.2, 0.28, {"dual_clip": 10.0})
    assert (loss.kl_coef, loss.entropy_coef, loss.aggregation) == (0.0, 0.0, "token_mean")
    assert role.max_prompt_tokens + role.sampling.max_tokens == 2048 + 16384
    world = args["environment"]["args"]
    tool = world["tools"][0]["args"]
    assert (world["max_calls"] + 1, tool["timeout_s"], tool["memory_mib"]) == (8, 30, 1024)
    prompt = (EXAMPLES / "published/retool/prompt.txt").read_text()
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n\n"), "one line end is the file's own"
    assert all(tag in prompt for tag in ("<code>\n```python", "<interpreter>", "<answer>\n\\boxed{"))


@pytest.mark.parametrize("name", ["published/sft_qwen2.5_math_7b", "published/sft_llama3.1_8b"])
def test_published_sft_has_the_papers_numbers(name):
    config = load(SftConfig, name)
    optimizer = config.optimizer
    assert (config.samples_per_step, config.steps, config.data.max_tokens) == (64, 800, 4096)
    assert (optimizer.lr, optimizer.decay, optimizer.warmup_steps, optimizer.decay_steps) == (5e-6, "cosine", 80, 800)
    assert (optimizer.betas, optimizer.weight_decay, optimizer.decay_norms) == ((0.9, 0.95), 0.01, True)


def test_the_page_on_data_shows_the_example_and_settings_that_there_are(tmp_path):
    """Each YAML block of docs/how_to/your_data.md loads, and the example's reward passes the preflight."""
    page = (EXAMPLES.parent / "docs/how_to/your_data.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    paths = [tmp_path / f"{number}.yaml" for number in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block)
    fields, run, sources, stages, sft = paths
    shown, example = config_files.load(TrainConfig, [run]), load(TrainConfig, "published/grpo_chat_qwen2.5_7b")
    assert (shown.data, shown.evaluation, shown.recipe) == (example.data, example.evaluation, example.recipe)
    assert (shown.run, shown.reward) == (example.run, example.reward)
    mapped = config_files.load(TrainConfig, [run, fields]).data
    assert mapped.fields == {"messages": "chat.turns", "answer": "labels.gold"}
    mixed = load(TrainConfig, "published/mixed_qwen2.5_7b")
    assert config_files.load(TrainConfig, [EXAMPLES / "published/mixed_qwen2.5_7b.yaml", sources]).data == mixed.data
    assert config_files.load(TrainConfig, [EXAMPLES / "published/mixed_qwen2.5_7b.yaml", stages]).stages == mixed.stages
    assert config_files.load(SftConfig, [sft]).model.chat_template == "chatml.jinja"
    with GradePool(shown.reward) as pool:
        prompts = [Prompt(id="0", tokens=[1], payload={"answer": "72"})]
        scores = check_reward(pool.grade, prompts, shown.reward.wrong_answer, shown.reward.answer_format)
    assert scores == {"preflight/reward_correct": 1.0, "preflight/reward_wrong": 0.0}


def test_the_rewards_in_readme_pass_the_preflight(tmp_path, monkeypatch):
    """They are as written there, and one is in another format; they run in real workers."""
    [code] = re.findall(r"```python\n# my_rewards.py\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    other = "def plain(response, payload):\n    return response == 'Answer: ' + payload['answer']\n"
    (tmp_path / "my_rewards.py").write_text(code + "\n\n" + other)
    monkeypatch.chdir(tmp_path)
    prompts = [Prompt(id="0", tokens=[1], payload={"answer": "72"})]
    boxed, plain = config.Reward().answer_format, "Answer: {answer}"
    with GradePool(config.Reward(target="my_rewards:grade")) as pool:
        assert check_reward(pool.grade, prompts, "x", boxed) == {
            "preflight/reward_correct": 1.0,
            "preflight/reward_wrong": 0.0,
        }
    with GradePool(config.Reward(target="my_rewards:plain")) as pool:
        assert check_reward(pool.grade, prompts, "x", plain)["preflight/reward_correct"] == 1.0
        with pytest.raises(PreflightFailure, match=r"reward.answer_format .* preflight.reward=false"):
            check_reward(pool.grade, prompts, "x", boxed)
