"""An Adam optimizer that Megatron-core can use without Transformer Engine and apex."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """An Adam optimizer whose state has the same layout as in Transformer Engine: the moments are in the state of each
    parameter, and `step` is in the parameter group.

    torch's AdamW stores `step` per parameter, and Megatron's distributed optimizer (ZeRO-1) cannot restore such a
    `step` from a checkpoint. The arithmetic is the same as in torch's Adam and AdamW.

    `fused`: whether one kernel updates many parameters at once, as in torch's AdamW. Default: True on CUDA, False on
    other devices. On CUDA the fused kernel moves 28 bytes per float32 parameter instead of 80, and needs no temporary
    tensors.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        fused: bool | None = None,
        **unused: Any,
    ) -> None:
        self.decoupled, self.fused = adam_w_mode, fused
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        )

    def initialize_state(self, param: torch.Tensor, *unused: Any) -> None:
        """Sets the first and second moment of a parameter to zeros."""
        self.state[param] = dict(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Performs one optimizer step on all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            for p in params:
                if not self.state.get(p):
                    self.initialize_state(p)
            if not params:
                continue
            self._update(params, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Updates `params`, which are parameters of `group`, and their moments in place. `group["step"]` is the number
        of this optimizer step, counted from 1."""
        moments = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        tensors = params, [p.grad for p in params], *moments, []
        settings = dict(
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        device = params[0].device
        if device.type == "cuda" if self.fused is None else self.fused:
            # The kernel is called directly, because torch's function `adamw` would increment `count`, which all
            # parameters share, once for each parameter.
            count = torch.full((), float(group["step"]), dtype=torch.float32, device=device)
            fused: Any = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
            fused(*tensors, [count] * len(params), **settings)
        else:
            update: Any = adamw if self.decoupled else adam
            update(*tensors, [torch.tensor(float(group["step"] - 1)) for _ in params], foreach=True, **settings)
