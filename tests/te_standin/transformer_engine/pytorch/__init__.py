"""The modules that megatron-core wraps."""

from transformer_engine.pytorch import distributed, fp8, ops, optimizers
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module import GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "distributed", "fp8",
    "fp8_autocast", "fp8_model_init", "ops", "optimizers",
]  # fmt: skip
