"""Real servers that do not start: the message has the cause, which stands far before the last line of the log."""

from __future__ import annotations

import os

import pytest
from processors import as_on
from test_engines_latents import LATENT, ROUTING, SIZES
from test_engines_sglang import PYTHON as SGLANG
from test_engines_vllm import PYTHON, VOCAB
from tiny_models import make_model
from toys import characters

from megatron_rl.cluster.host_address import free_port
from megatron_rl.engines.kind import ServerStart
from megatron_rl.engines.server_process import ServerProcess, StartError, make_token
from megatron_rl.engines.sglang import kind as sglang
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.engines.vllm import kind as vllm
from megatron_rl.engines.vllm.settings import Vllm

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_model(
        tmp_path_factory.mktemp("model"), "deepseek_v3", vocab_size=VOCAB, **SIZES, **LATENT, **ROUTING
    )
    characters().save_pretrained(directory)
    return directory


@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: there is no {PYTHON}; `make engines` installs it")
@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        pytest.param(
            {"args": ("--attention-backend", "AMX_MLA")},
            # vLLM's kernels for processors without AVX-512 are a library without this one.
            r"\(EngineCore pid=\d+\) (RuntimeError: expect weight to be bfloat16|AttributeError: .*_weight_packed).*\n"
            r"  at .*/mla/amx_mla.py:\d+",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            {"kv_cache_gib": 1e6},
            r"\(EngineCore pid=\d+\) ValueError: Available memory .* is less than requested memory for kv .*\n"
            r"  at .*/cpu_worker.py:\d+",
            marks=pytest.mark.matrix,
        ),
        (
            {"args": ("--hf-overrides", '{"architectures": ["NoSuchModel"]}')},
            r"ValidationError: 1 .*\n.* \['NoSuchModel'\] are not supported .*\n.*\n  at .*/vllm/.*:\d+",
        ),
    ],
    ids=["a dtype that kernels refuse", "too little memory", "an unknown model"],
)
def test_a_server_that_does_not_start_tells_the_first_error_of_its_processes(
    model, tmp_path, monkeypatch, settings, cause
):
    """The message ended in "Engine core initialization failed. See root cause above"."""
    as_on(monkeypatch, "amx")
    check(vllm, Vllm(**settings), PYTHON, model, tmp_path, cause)


@pytest.mark.skipif(not SGLANG.exists(), reason=f"no SGLang: there is no {SGLANG}; `make engines-sglang` installs it")
def test_a_server_of_sglang_tells_so_too(tmp_path):
    make_model(tmp_path / "model", vocab_size=VOCAB, num_hidden_layers=1)
    characters().save_pretrained(tmp_path / "model")
    cause = r"RuntimeError: Not enough memory\. .*\n  at .*/pool_configurator.py:\d+"
    check(sglang, Sglang(kv_cache_gib=1e-8), SGLANG, tmp_path / "model", tmp_path, cause)


def check(engine, settings, python, model, directory, cause):
    make_token(directory / "token")
    start = ServerStart(
        python=str(python), model=model, dtype="float32", port=free_port("127.0.0.1"), token_file=directory / "token",
        on_gpu=False,
    )  # fmt: skip
    process = ServerProcess(
        engine.command(settings, start), directory / "engine.log", os.environ, imports=directory / "imports"
    )
    with pytest.raises(StartError, match=rf"\nthe first error there:\n.*{cause}$"):
        process.wait_until(lambda: False, 600)
