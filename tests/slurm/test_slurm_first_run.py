"""Walks through sections 1 to 9 of docs/how_to/cluster.md, command for command, on a real Slurm with tiny models.

The commands are read from the page. What they print is compared with what the page says they print: a number stands for
any number there, and `...` for any text. What is replaced, and why, stands in LEFT_OUT, REPLACED and SIZES.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, environment
from docs_pages import Block, blocks_of, commands
from example_home import make_home
from fake_hub import Repository, hub
from limits import RUN_S
from slurm_site import logs, works

from megatron_rl.cluster import job_slices
from megatron_rl.run.metrics import read_metrics

pytestmark = [pytest.mark.multi, pytest.mark.slow]
PAGE = ROOT / "docs/how_to/cluster.md"
END = "## Job arrays of each kind of run"  # the heading behind the sections that are walked through
TANGO = "examples/published/tango_qwen2.5_7b.yaml"
# Commands that are not run: the environment is that of the tests, and their profile stands in for the copied one.
LEFT_OUT = {"cd", "git", "slurm/gpu/install.sh", ".", "export"}
# Words of the page, and what stands in their place. One rank runs on each node; the teacher, both roles and the
# evaluations have embedded engines, for vLLM takes a minute to start.
REPLACED = {
    "32": "2",  # --ranks
}
TASK = {
    "generator": "examples/miniatures/last_letter/prompts/generator.txt",
    "verifier": "examples/miniatures/last_letter/prompts/verifier.txt",
    "reward": "{target: 'megatron_rl.contrib.last_letter:grade', wrong_answer: z z z}",
}
# Overrides behind each config of the page: sizes, lengths and prompts of the last-letter task.
SIZES = {
    "examples/published/generate_sft_llama3.1_70b.yaml": [
        "model.dtype=float32", "data.settings=last_letter", "data.limit=64", f"template={TASK['generator']}",
        "chat=false", "sampling={max_tokens: 48, temperature: 0.7}", "max_prompt_tokens=64", "engine={kind: embedded}",
    ],
    "examples/published/sft_qwen2.5_math_7b.yaml": [
        "model={dtype: float32, recompute: none}", "layout={tp: 1, sequence_parallel: false}", "data.max_tokens=128",
        "steps=10", "optimizer={lr: 1e-3, warmup_steps: 2, decay_steps: 10}", "samples_per_step=16", "validate_every=0",
        "micro_batch_tokens=2048", "run.save_every=5",
    ],
    TANGO: [
        *(f"roles.{role}.{setting}" for role in ("generator", "verifier") for setting in (
            "model.dtype=float32", "layout={tp: 1, sequence_parallel: false}", "optimizer.lr=1.5e-4",
            "micro_batch_tokens=1024")),
        "roles.generator.sampling.max_tokens=48", "roles.generator.max_prompt_tokens=64",
        "roles.verifier.sampling.max_tokens=72", "roles.verifier.max_prompt_tokens=160", "engine={kind: embedded}",
        f"recipe.args.generator_template={TASK['generator']}", f"recipe.args.verifier_template={TASK['verifier']}",
        "recipe.args.step_labels=megatron_rl.contrib.last_letter:step_labels", "recipe.args.generator_updates=30",
        "recipe.args.warmup_updates=1", f"reward={TASK['reward']}", "data.settings=last_letter",
        "evaluation.sets=[{name: math500, path: HuggingFaceH4/MATH-500, settings: last_letter}]",
        "evaluation.limit=16", "evaluation.at_start=false",
        "evaluation.every=0", "run.prompts_per_iteration=8", "run.save_every=1",
    ],
    "examples/published/eval_tango_qwen2.5_7b.yaml": [
        "model.dtype=float32", "sets=[math500]", f"template={TASK['generator']}",
        "sampling={max_tokens: 40, temperature: 0.0}", "engine={kind: embedded}",
    ],
}  # fmt: skip


@pytest.fixture
def served(last_letter) -> Iterator[str]:
    """A hub that has the names of the page: tiny models, and problems of the last-letter task."""
    models = {
        "meta-llama/Llama-3.1-70B-Instruct": "generator",
        "Qwen/Qwen2.5-Math-7B": "generator",
        "Qwen/Qwen2.5-7B": "verifier",
    }
    problems = {
        "PRIME-RL/Eurus-2-SFT-Data": "train",
        "PRIME-RL/Eurus-2-RL-Data": "train",
        "HuggingFaceH4/MATH-500": "test",
    }
    found = {}
    for name, role in models.items():
        files = (last_letter / role / "model").iterdir()
        found[f"models/{name}"] = Repository({file.name: file.read_bytes() for file in files if file.is_file()})
    for name, split in problems.items():
        found[f"datasets/{name}"] = Repository({f"{split}.jsonl": (last_letter / f"task/{split}.jsonl").read_bytes()})
    with hub(**found) as own:
        yield own.url


@pytest.mark.matrix
def test_every_command_of_the_first_run_does_what_the_page_says(site, served, tmp_path):
    cluster, profile = site
    home, run = make_home(tmp_path), tmp_path / "runs/tango_qwen2.5_7b"
    own = environment() | cluster.environment() | {"HF_ENDPOINT": served, "HF_HOME": f"{home}/hf", "COLUMNS": "160"}
    jobs: list[str] = []
    for block, expected in steps():
        said = ""
        if block.language == "yaml":
            (home / "my_paths.yaml").write_text(block.text.replace("/shared/me", str(home)))
            continue
        for words in commands(block.text):
            if words[0] in LEFT_OUT:
                continue
            words = replaced(words, home)
            done = subprocess.run(words, cwd=home, env=own, capture_output=True, text=True, timeout=RUN_S)
            assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs(run)}"
            said += done.stdout
            if words[-3:-1] == ["init", "profile"]:
                profile.replace(home / "my_site.yaml")
            jobs += re.findall(r"^submitted .*: job (\d+)$", done.stdout, re.MULTILINE)
            if "submit" in words and TANGO in words and "--dry-run" not in words and not job_slices.read(run):
                works(run, 1)  # the page looks at it, and stops it, while it runs
            elif ("submit" in words and "--dry-run" not in words) or "stop" in words:
                assert "RUNNING" not in cluster.wait(jobs[-1]).values(), logs(run)
        for line in expected:
            assert re.search(pattern(line), said), f"{block.name}: it does not print {line!r}:\n{said[-4000:]}"
    begun = job_slices.read(run)
    assert len(begun) == 2 and begun[0].iterations_before == 0 < begun[1].iterations_before and job_slices.finished(run)
    assert {row.scope for row in read_metrics(run)} >= {"generator", "verifier", "eval"}
    assert {"config.json", "model.safetensors"} <= {file.name for file in (run / "exported/verifier").iterdir()}
    results = [json.loads(file.read_text()) for file in (home / "runs/eval").glob("*.json")]
    assert len(results) == 2 and all("accuracy" in result["metrics"] for result in results)


def steps() -> list[tuple[Block, list[str]]]:
    """Returns the blocks of commands and the config of the page's sections 1 to 9 in order, each with the lines that it
    is said to print."""
    end = PAGE.read_text(encoding="utf-8").splitlines().index(END) + 1
    out: list[tuple[Block, list[str]]] = []
    for block in blocks_of(PAGE):
        if block.line > end or block.mark == "not a config":
            continue
        if block.language == "text":
            out[-1][1].extend(block.text.splitlines())
        else:
            out.append((block, []))
    assert len(out) >= 8 and sum(bool(lines) for _, lines in out) >= 7
    return out


def replaced(words: list[str], home: Path) -> list[str]:
    """Returns a command of the page as the test runs it."""
    own = [REPLACED.get(word, word) for word in words]
    at = own.index("megatron-rl")
    files = [file for file in SIZES if file in own]
    small = [setting for file in files for setting in SIZES[file]]
    if "plan" in own:  # it is a plan of the page's own sizes, whose model is a tiny one here
        small = ["roles.generator.model.path=Qwen/Qwen2.5-Math-7B"]
    own = [*own[:at], sys.executable, "-m", "megatron_rl.main", *own[at + 1 :]]
    for file in files:
        place = own.index(file) + 1 + ("my_paths.yaml" in own)
        own[place:place] = small
    return [word.replace("/shared/me", str(home)) for word in own]


def pattern(line: str) -> str:
    """Returns the pattern of a line of the page: `...` is any text, and a number any number."""
    parts = [re.sub(r"\d[\d.,]*", r"[\\d.,]+", re.escape(part.strip())) for part in line.split("...")]
    return ".*".join(parts)


def test_a_line_of_the_page_is_met_by_other_numbers_alone():
    assert re.search(pattern("submitted ...train.sbatch: job 2"), "submitted /a/b/train.sbatch: job 17")
    assert re.search(pattern("a cycle: 758 s, ..."), "a cycle: 1,024 s, 3 tokens")
    assert not re.search(pattern("... of 440 iterations"), "3 of forty iterations")
    assert not re.search(pattern("train: the config is valid for 16 ranks"), "train: the config is wrong")
