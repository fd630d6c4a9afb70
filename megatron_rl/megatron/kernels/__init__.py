"""GPU kernels that each replace several torch operations. The kernels do not depend on Megatron-core."""
