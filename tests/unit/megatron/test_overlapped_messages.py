"""What megatron-core may do with a pipeline stage's output while it is still being sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny_models import make_model

from megatron_rl.config.schema import Layout, Model
from megatron_rl.megatron import model as models
from megatron_rl.weights import hf_model


@pytest.mark.parametrize(
    ("layout", "gives_away"),
    [
        (Layout(pp=2), True),
        (Layout(pp=2, vpp=2, overlap_p2p=True), False),
    ],
)
def test_an_output_on_its_way_over_gloo_keeps_its_memory(tmp_path, layout, gives_away):
    """On a busy machine gloo sent what came into that memory next, and losses and gradients were wrong."""
    arch = hf_model.read_architecture(make_model(tmp_path / "model", "llama"))
    config = models.transformer_config(arch, Model(path=str(tmp_path)), SimpleNamespace(layout=layout))  # type: ignore[arg-type]
    assert config.deallocate_pipeline_outputs == gives_away
