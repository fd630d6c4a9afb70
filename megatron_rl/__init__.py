"""Co-training of a generator and a generative verifier by reinforcement learning on Megatron-core."""

__version__ = "0.1.0"
