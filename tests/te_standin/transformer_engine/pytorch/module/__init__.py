"""Linear modules and norms."""

from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

__all__ = ["GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm"]
