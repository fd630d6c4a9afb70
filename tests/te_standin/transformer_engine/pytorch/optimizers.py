"""Adam with `step` in the parameter group, and operations on lists of tensors that megatron-core takes from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW with moments in float32 and `step` in the parameter group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **unused: Any,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Makes the moments of a parameter, zeros."""
        self.state[param] = {name: torch.zeros_like(param, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param)
                self._update(param, group, step, first, second)

    def _update(self, param: Tensor, group: dict[str, Any], step: int, first: float, second: float) -> None:
        mean, square, grad = self.state[param]["exp_avg"], self.state[param]["exp_avg_sq"], param.grad.float()
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * param
        mean.mul_(first).add_(grad, alpha=1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        fix = group["bias_correction"]
        scale = (square / (1 - second**step if fix else 1.0)).sqrt_().add_(group["eps"])
        change = mean / (1 - first**step if fix else 1.0) / scale
        if self.adam_w_mode:
            change = change + group["weight_decay"] * param
        param.sub_(change, alpha=group["lr"])


FusedSGD = torch.optim.SGD


def multi_tensor_applier(op: Callable[..., Any], noop_flag: Tensor, tensor_lists: Sequence[Any], *args: Any) -> Any:
    """Calls an operation on lists of tensors."""
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_scale(chunk: int, noop_flag: Tensor, tensor_lists: Sequence[Any], scale: float) -> None:
    """Writes the first list's tensors, times `scale`, to the second list's."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(
    chunk: int, noop_flag: Tensor, tensor_lists: Sequence[Any], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns (the norm of all tensors together, those of each where they are asked for)."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().view(1), norms if per_tensor else None
