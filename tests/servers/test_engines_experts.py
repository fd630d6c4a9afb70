"""Models with experts on a real vLLM server: its answers are those of transformers, before an update of the actor and
after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import conformance
import pytest
from engines_worker import prompts
from ranks import run_ranks
from test_engines_vllm import PYTHON, VOCAB, completions
from tiny_models import make_model
from toys import characters

pytestmark = [
    pytest.mark.servers, pytest.mark.multi, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it"),
]  # fmt: skip
CONFIG = """
roles:
  generator: {{model: {{path: {base}/model}}, layout: {layout}, optimizer: {{lr: 0.003}}, micro_batch_tokens: 64}}
families: {families}
recipe: {{target: megatron_rl.recipes.grpo:Grpo}}
data: {{path: nowhere.jsonl}}
engine: {{kind: vllm, python: {python}, kv_cache_gib: 0.25, max_batch: 16}}
run: {{dir: {base}, name: run}}
refit: {{timeout_s: 300, message_timeout_s: 60, verify: full}}
"""


def check_before_and_after_an_update(
    base: Path, family: str, layout: str, *, families: Sequence[str] = (), **sizes: object
) -> None:
    """Greedy answers of a server, their log-probs and the log-probs of given text are those of transformers on the
    weights of an actor of two ranks: of its start, and after one update.
    """
    make_model(base / "model", family, vocab_size=VOCAB, eos_token_id=7, **sizes)
    characters().save_pretrained(base / "model")
    (base / "run").mkdir()
    config = base / "run/config.yaml"
    config.write_text(CONFIG.format(base=base, python=PYTHON, layout=layout, families=[*families]))
    worker = Path(__file__).parents[1] / "helpers" / "engines_worker.py"
    found = run_ranks(worker, 2, base / "ranks", str(config), "update")[0]
    check_answers(base, found)


def check_answers(base: Path, found: Mapping[str, Any]) -> None:
    """Compares what the ranks in `base`/ranks asked a server, before an update and after it, with transformers on the
    weights that they kept. `found`: the answers by name, as engines_worker.py writes them."""
    assert found["greedy_v0"] != found["greedy_v1"], "the update changed nothing"
    for version in (0, 1):
        weights = base / f"ranks/v{version}"
        (weights / "config.json").write_text((base / "model/config.json").read_text())
        judge = conformance.Judge(weights, characters())
        answers, scores = completions(found[f"greedy_v{version}"]), found[f"scores_v{version}"]
        for prompt, (completion,), own in zip(prompts(VOCAB), answers, scores, strict=True):
            judge.check_greedy(prompt, completion)
            assert completion.model_logprobs is not None and completion.versions == [(0, version)]
            assert own == pytest.approx(judge.scores(prompt).tolist(), abs=conformance.NEAR)


def test_experts_reach_the_server_whole_and_packed_as_it_wants_them(tmp_path):
    """An actor with its experts over two ranks. vLLM packs experts on a CPU when it loads them, and forgets to when it
    reloads them.
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    check_before_and_after_an_update(tmp_path, "qwen3_moe", "{ep: 2}", **sizes)
