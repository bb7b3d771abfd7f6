"""Lets torchvision be imported beside torch's build for CPUs, for which the package index has no compiled operators of it.

Python imports this module by its name at each start, where this folder is in PYTHONPATH. What vLLM takes of torchvision, the preparation of
images and videos, needs none of these operators; that they are declared is enough.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_DECLARED = list[Any]()  # an operator is there as long as its library


class _Declares(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED.append(library)


sys.meta_path.insert(0, _Declares())
