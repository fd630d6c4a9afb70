"""Lets PyPI's torchvision, a CUDA build, be imported beside a CPU build of torch: it dies registering a fake of
operators that its library, which does not load, should have declared. Declaring them first is enough.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    library: Any = None  # kept: its operators go with it

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _BeforeTorchvision.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                _BeforeTorchvision.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _BeforeTorchvision())
