"""Linear modules over tensor-parallel ranks, with a norm in front, and grouped by experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.distributed import FromRows, ToColumns
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, get_dummy_wgrad
from transformer_engine.pytorch.module.rmsnorm import rms_norm


class _Product(torch.autograd.Function):
    """x W^T. With `fused` the weight's gradient is added to its `main_grad`, in that one's dtype; what autograd gets
    stands for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.fused = fused
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None, None
        rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if not ctx.fused:
            return for_x, rows.T @ columns, None
        weight.main_grad.add_(rows.T.float() @ columns.float())
        weight.grad_added_to_main_grad = True
        return for_x, get_dummy_wgrad([*weight.shape], weight.dtype, getattr(weight, "zero_out_wgrad", False)), None


class _Parallel(TransformerEngineBaseModule):
    """What linear modules have in common: their share of a matrix among tensor-parallel ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.parallel_mode = parallel_mode
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        self.save_original_input = False

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def _make(self, suffix: str, init_method: Callable[[Tensor], Any], dtype: Any, device: Any) -> None:
        """Makes a weight and a bias, or in the place of the bias an empty tensor."""
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype, device=device))
        with torch.no_grad():
            init_method(weight)
        if self.parallel_mode is not None:
            _divided(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(f"weight{suffix}", weight)
        if not self.use_bias:
            setattr(self, f"bias{suffix}", torch.empty(0, dtype=dtype, device=device))
            return
        bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device))
        if self.parallel_mode == "column":
            _divided(bias, 0)
        elif self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter(f"bias{suffix}", bias)

    def _run(self, x: Tensor) -> Any:
        """Multiplies, with the communication before or behind."""
        assert x.is_cuda, "the module's tensors must be on the GPU"
        if self.parallel_mode == "column" and self.tp_size > 1:
            x = ToColumns.apply(x, self.tp_group, self.sequence_parallel)
        out: Any = _Product.apply(x, self.weight, self.fuse_wgrad_accumulation)
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = FromRows.apply(out, self.tp_group, self.sequence_parallel)
        if self.use_bias and not self.return_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class Linear(_Parallel):
    """A matrix that tensor-parallel ranks share by columns, by rows or not at all."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] = torch.nn.init.normal_,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__(
            in_features, out_features, sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, bias=bias, return_bias=return_bias,
            parallel_mode=parallel_mode,
        )  # fmt: skip
        self._make("", init_method, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._run(inp)


class LayerNormLinear(_Parallel):
    """A norm, and a matrix that tensor-parallel ranks share by columns."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[Tensor], Any] = torch.nn.init.normal_,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ) -> None:
        assert normalization == "RMSNorm" and not return_layernorm_output, (
            "the stand-in has root-mean-square norms alone"
        )
        super().__init__(
            in_features, out_features, sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, bias=bias, return_bias=return_bias,
            parallel_mode=parallel_mode,
        )  # fmt: skip
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(fill(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self._make("", init_method, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._run(rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma))


class GroupedLinear(_Parallel):
    """One matrix per expert, each for its own run of rows. Communication is the caller's."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] = torch.nn.init.normal_,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, bias=bias, return_bias=return_bias,
            parallel_mode=parallel_mode,
        )  # fmt: skip
        assert not bias, "the stand-in's experts have no bias"
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self._make(str(number), init_method, params_dtype, device)

    def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        parts = [
            _Product.apply(part, getattr(self, f"weight{number}"), self.fuse_wgrad_accumulation)
            for number, part in enumerate(inp.split([*m_splits]))
        ]
        return torch.cat(parts)  # type: ignore[arg-type]


def _divided(parameter: Tensor, dim: int) -> None:
    """Marks a parameter of which tensor-parallel ranks hold different parts, as core reads it."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1  # type: ignore[attr-defined]
