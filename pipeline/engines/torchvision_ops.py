"""Import PyPI's torchvision beside a CPU build of torch.

SGLang imports torchvision unconditionally and transformers imports it whenever it is installed. PyPI's wheel is linked
against CUDA, so its C++ library does not load here, and its `_meta_registrations` then fails because the operators were
never declared: "operator torchvision::nms does not exist". Declaring their signatures is enough to import it; calling
one still fails with torchvision's own message. With a build whose library does load, nothing is declared.
"""

from __future__ import annotations

import importlib.abc
import sys

_MODULE = "torchvision._meta_registrations"
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPS = ("nms", "qnms")  # the ones that torchvision 0.28 registers without first asking whether its library loaded

_library = None  # torch unregisters a library's operators when the object dies


class _DeclareBeforeUse(importlib.abc.MetaPathFinder):
    """Watches for the one import that needs the operators. By then torchvision has tried to load its library."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == _MODULE:
            sys.meta_path.remove(self)
            _declare_missing()
        return None  # the normal finders import the module


def _declare_missing() -> None:
    global _library
    import torch

    missing = [op for op in _OPS if not hasattr(torch.ops.torchvision, op)]
    if missing:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for op in missing:
            _library.define(op + _SIGNATURE)


def declare_on_import() -> None:
    """Arrange that torchvision can be imported in this process. Cheap (torch is not imported here) and idempotent."""
    if _MODULE not in sys.modules and not any(isinstance(f, _DeclareBeforeUse) for f in sys.meta_path):
        sys.meta_path.insert(0, _DeclareBeforeUse())
