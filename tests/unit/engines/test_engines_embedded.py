"""The embedded engine conforms. The servers' own files run the same checks against real servers."""

import conformance
import pytest
from tiny_models import make_model
from toys import characters

from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine


@pytest.fixture(scope="module")
def engine_and_judge(tmp_path_factory):
    directory = make_model(tmp_path_factory.mktemp("model"), "qwen2", eos_token_id=7)
    tokenizer = characters()
    engine = EmbeddedEngine(directory, tokenizer=tokenizer)
    engine.load_pretrained()
    return engine, conformance.Judge(directory, tokenizer)


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_embedded_engine_conforms(engine_and_judge, name):
    conformance.CHECKS[name](*engine_and_judge)
