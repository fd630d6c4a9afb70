"""The program from outside: help, checks, launchers, and commands that a user chains."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import CHATML, chat_tokenizer, said
from conftest import ROOT, environment, program, tango_settings
from limits import RUN_S
from tiny_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_rl.cluster.host_address import free_port
from megatron_rl.run.metrics import read_metrics
from megatron_rl.session.launch_ranks import Place, place_from
from megatron_rl.training.rollout_parquet import from_table


def test_help_names_every_command_and_the_list_of_settings_every_setting():
    text = program("--help").stdout
    assert all(name in text for name in ("train", "sft", "generate", "eval", "report", "check", "init", "a.b=c"))
    assert "prompts_per_iteration" not in text and "megatron-rl settings" in program("train", "--help").stdout
    train, sft = program("settings", "--all").stdout, program("settings", "--all", "--command", "sft").stdout
    for line in (
        "roles.NAME.layout.tp = 1\n    number of tensor-parallel ranks",
        "debug.replay = null\n",
        "run.prompts_per_iteration = 256\n",
        "roles.NAME.data\n",
    ):
        assert line in train, line
    assert "optimizer.lr = 5e-06" in sft and 'run.name = "sft"' in sft  # SFT's own


def test_check_says_what_is_wrong_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from megatron_rl.main import main\n"
        "sys.exit(main(['check', 'examples/published/tango_qwen2.5_7b.yaml', '--ranks', '32', '--elsewhere']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "samples per update" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("roles.generator.layot.tp=2", "did you mean 'layout'"),
        ("roles.generator.layout.tp=2.5", "2.5"),
        ("roles.generator.layout.tp=3", "does not divide 32 ranks"),
        ("roles.generator.layout={pp: 2, vpp: 2}", "overlap_p2p=true"),
        ("roles.generator.layout={tp: 1, sequence_parallel: true}", "tp above 1"),
        ("run.iterations=0", "run.iterations"),
        ("roles.generator.micro_batch_tokens=100", "would not fit"),
        ("nothing", "no such config file"),
        ("roles.generator.sampling.top_p=0.0", "top_p"),
        ("roles.generator.loss.kl_coef=-1.0", "kl_coef"),
        ("roles.generator.optimizer.min_lr=1.0", "is above optimizer.lr"),
        ("roles.generator.optimizer={decay: linear, decay_steps: 5, warmup_steps: 5}", "raise it"),
        ("recipe.args.updates=5", "updates: unknown key; did you mean"),
        ("recipe.args.alpha_start=1.5", "alpha_start = 1.5: give a value less than or equal to 1"),
        ("recipe.args.alpha_min=0.0", "give a number above 0"),
        ("recipe.args.verifier_template=nowhere.txt", "no prompt template 'nowhere.txt'"),
        ("recipe.args.step_labels=nowhere:labels", "cannot import nowhere"),
        ("recipe.target=megatron_rl.recipes.grpo:Grpo", "unknown key"),
        ("reward.target=megatron_rl.rewards.math_answer:grad", "did you mean 'grade'"),
        ("run.iterations=100000", "but the recipe plans"),
    ],
)
def test_check_refuses_with_the_value_and_the_cure(change, says):
    done = program(
        "check", "examples/published/tango_qwen2.5_7b.yaml", change, "--ranks", "32", "--elsewhere", check=False
    )
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_heads_must_divide_by_tp(last_letter):
    done = program(
        "check", "examples/miniatures/last_letter/grpo.yaml",
        f"roles.generator.model.path={last_letter}/generator/model",
        "roles.generator.layout.tp=4", "--ranks", "4", check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "num_key_value_heads = 2" in done.stderr


def test_places_of_the_launchers():
    assert place_from({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert place_from(torchrun) == Place(3, 8, 1, "a", 5)
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}
    told = place_from(step | {"MASTER_ADDR": "b", "MASTER_PORT": "6"})
    assert told is not None and (told.rank, told.world_size, told.local_rank, told.address, told.port) == (
        2,
        4,
        2,
        "b",
        6,
    )
    meets = place_from(step | {"SLURM_RESTART_COUNT": "1"})
    assert meets is not None and meets.port is None and meets.session == "17.1.0"
    assert (
        place_from({name: value for name, value in step.items() if name != "SLURM_STEP_ID"}) is None
    )  # the batch script itself
    with pytest.raises(ValueError, match="MASTER_PORT"):
        place_from(step | {"MASTER_ADDR": "b"})


@pytest.mark.slow
@pytest.mark.multi
def test_verls_parquet_is_trained_on_in_the_chat_template(tmp_path):
    """From the file to an update and a model that keeps the template that it was trained with."""
    model, tokenizer = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=104), chat_tokenizer(None)
    tokenizer.save_pretrained(model)
    (tmp_path / "chatml.jinja").write_text(CHATML)
    prompts = [[said("system", "s"), said("user", f"{i} + 1?")] for i in range(4)]
    rows = [
        {"prompt": p, "reward_model": {"ground_truth": str(i + 1)}, "extra_info": {"index": i}}
        for i, p in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    settings = [
        f"roles.generator.model={{path: {model}, chat_template: {tmp_path}/chatml.jinja}}",
        "roles.generator.sampling.max_tokens=4", "roles.generator.max_prompt_tokens=100", "run.save_every=0",
        "recipe={target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 1, group_size: 2}}",
        f"data.path={tmp_path}/train.parquet", f"run.dir={tmp_path}", "run.name=chat", "run.prompts_per_iteration=4",
        "run.train_without_signal=true", "preflight.reward=false", "run.save_rollouts_every=1",
        "run.profile.iterations=[0]", "roles.generator.loss.centering=20",
    ]  # fmt: skip
    program("train", *settings)
    [metrics] = [row.metrics for row in read_metrics(tmp_path / "chat") if row.scope == "generator"]
    assert 0.1 < metrics["head_mass"] < 0.9, "20 of 104 nearly equal probabilities"
    assert 0 <= metrics["drift_mass"] < 1e-4, "engine and trainer agree"
    with gzip.open(tmp_path / "chat/profiles/iteration_000000_rank_0.json.gz") as file:
        named = {e["name"] for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"}
    assert {"rollouts", "train", "forward_backward", "optimizer", "refit"} <= named
    [iteration] = (tmp_path / "chat/rollouts").glob("iteration_*.parquet")
    rollouts = from_table(pq.read_table(iteration))
    tokenizer.chat_template = CHATML
    expected = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    assert sorted(rollout.tokens[: rollout.start].tolist() for rollout in rollouts) == sorted(expected * 2)
    assert AutoTokenizer.from_pretrained(tmp_path / "chat/models/generator").chat_template == CHATML


@pytest.mark.slow
@pytest.mark.multi
def test_eval_and_generate_on_two_ranks(last_letter, tmp_path):
    shared = [
        f"model.path={last_letter}/generator/model",
        "template=examples/miniatures/last_letter/prompts/generator.txt", "sampling.max_tokens=40", "launch.nproc=2",
    ]  # fmt: skip
    rows = f"{{path: {last_letter}/task/test.jsonl, settings: last_letter}}"
    program("generate", *shared, f"data={rows}", f"output={tmp_path}/pairs", "validation_share=0.25", "n=2")
    train, held = (pq.read_table(tmp_path / f"pairs/{name}.parquet").to_pylist() for name in ("train", "validation"))
    assert 44 <= len(train) <= 48 and 14 <= len(held) <= 16, (
        "of 32 problems two each; answers that were cut are left out"
    )
    assert not {row["question"] for row in train} & {row["question"] for row in held}
    text = program(
        "eval",
        *shared,
        f"sets=[{rows}]",
        "reward.target=megatron_rl.contrib.last_letter:grade",
        f"output={tmp_path}/eval.json",
    ).stdout
    answer = json.loads((tmp_path / "eval.json").read_text())
    responses = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert f"{answer['metrics']['accuracy']:.4f}" in text and len(responses) == 32
    scores = [r["score"] for r in responses]
    assert 0 < answer["metrics"]["accuracy"] == pytest.approx(sum(score > 0.5 for score in scores) / 32)
    assert answer["metrics"]["reward"] == pytest.approx(sum(scores) / 32)


@pytest.mark.slow
@pytest.mark.multi
def test_tango_under_torchrun_with_two_layouts_and_a_replay(last_letter, tmp_path):
    """Generator with tp 2, verifier with dp 2, several optimizer steps per update, sleep; then the same iterations from
    their record.
    """
    arguments = [
        *tango_settings(last_letter, tmp_path, "run"), "roles.generator.layout.tp=2",
        "roles.generator.samples_per_optimizer_step=20",
        "roles.verifier.sleep=true", "recipe.args.generator_updates=3", "evaluation.sets=[]",
    ]  # fmt: skip
    port = str(free_port("127.0.0.1"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port,
         "-m", "megatron_rl.main", "train", *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    generator = [row["metrics"] for row in rows if row["scope"] == "generator"]
    assert generator[0]["optimizer_steps"] == 2.0 and generator[0]["engine_gap"] < 1e-4
    for name in (
        "alpha",
        "kl_ref",
        "entropy",
        "groups_without_signal",
        "steps_per_solution",
        "verdicts_match",
        "finished",
        "version_lag",
    ):
        assert all(name in metrics for metrics in generator), name
    program("report", tmp_path / "run")
    assert (tmp_path / "run/report.html").stat().st_size > 20_000

    replayed = [a.replace("run.name=run", "run.name=again") for a in arguments]
    program("train", *replayed, f"debug.replay={tmp_path}/run")
    for name in ("generator", "verifier"):
        first, second = (tmp_path / run / "models" / name / "model.safetensors" for run in ("run", "again"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
@pytest.mark.multi
def test_tango_with_a_verifier_of_another_family_size_and_tokenizer(last_letter, tmp_path):
    """A Llama whose words have other numbers judges a Qwen2: between them goes text.

    Context parallel beside tensor parallel.
    """
    words = AutoTokenizer.from_pretrained(last_letter / "task/model").get_vocab()
    named = sorted(
        words, key=lambda word: (words[word] > 2, -words[word] if words[word] > 2 else words[word])
    )  # the special three stay
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(named)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    make_model(
        tmp_path / "llama", "llama", vocab_size=len(named), hidden_size=32, num_hidden_layers=2, intermediate_size=96,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    own.save_pretrained(tmp_path / "llama")
    program(
        "sft", "examples/miniatures/last_letter/sft.yaml", f"model.path={tmp_path}/llama",
        f"data.train={last_letter}/task/verifier_sft.jsonl",
        "steps=60", "optimizer.decay_steps=60", "run.name=verifier", f"run.dir={tmp_path}", "launch.nproc=1",
    )  # fmt: skip
    program(
        "train", *tango_settings(last_letter, tmp_path, "run"), f"roles.verifier.model.path={tmp_path}/verifier/model",
        "roles.generator.layout.cp=2", "roles.verifier.layout.tp=2", "recipe.args.generator_updates=2",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("generator", "verifier"):
        iterations = [row["metrics"] for row in rows if row["scope"] == name]
        assert iterations and all(metrics["engine_gap"] < 1e-4 for metrics in iterations if "engine_gap" in metrics), (
            name
        )
    assert AutoTokenizer.from_pretrained(tmp_path / "run/models/verifier").get_vocab() == own.get_vocab() != words
    assert json.loads((tmp_path / "run/models/verifier/config.json").read_text())["model_type"] == "llama"
