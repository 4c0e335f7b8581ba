"""Runs at the start of every Python process that has this folder on PYTHONPATH, i.e. of the engine's processes.

A spawned scheduler imports transformers, and so torchvision, before SGLang loads any plugin; this is the only place
early enough. The interpreter runs one `sitecustomize` only, so the next one on the path is run from here.
"""

import contextlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

with contextlib.suppress(ImportError):  # another interpreter that inherited PYTHONPATH
    from pipeline.engines.torchvision_ops import declare_on_import

    declare_on_import()


def _run_next() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.realpath(p) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_next()
