"""A stand-in for Transformer Engine, for tests on machines without CUDA. It is not Transformer Engine.

It has the names, the arguments, the parameters and the refusals of the modules that megatron-core wraps, as they are in
the release below, over torch's own operations. So megatron-core's wrappers, its layer spec, checkpoints and weight maps
for Transformer Engine run where its CUDA library cannot be installed. It has none of its kernels, no 8-bit products, no
overlap of communication, and says nothing about its precision or speed.
"""

from transformer_engine import common, pytorch

__version__ = "2.6.0"
__all__ = ["common", "pytorch"]
