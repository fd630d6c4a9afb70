"""The commands of docs/tutorials/laptop_to_slurm.md that need Slurm, on a real cluster."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment
from docs_pages import blocks_of, commands
from limits import RUN_S
from slurm_site import logs

from megatron_rl.cluster import job_slices

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def test_the_tutorials_run_is_submitted_and_finishes(site, tmp_path):
    cluster, profile = site
    profile.rename(tmp_path / "my_site.yaml")
    own = environment() | cluster.environment()
    page = blocks_of(ROOT / "docs/tutorials/laptop_to_slurm.md")
    [submits] = [block for block in page if block.language == "bash" and "submit" in block.text and block.mark]
    said = ""
    for words in [["megatron-rl", "init", "grpo", "first.yaml", "--tiny", "tiny"], *commands(submits.text)]:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_rl.main", *words[1:]],
            cwd=tmp_path, env=own, capture_output=True, text=True, timeout=RUN_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
        if "submit" in words:
            [job] = re.findall(r"job (\d+)$", done.stdout, re.MULTILINE)
            assert "RUNNING" not in cluster.wait(job).values()
    run = tmp_path / "runs/big"
    assert job_slices.finished(run), logs(run)
    assert "20 of 20 iterations" in said and (run / "models/generator/config.json").is_file()
