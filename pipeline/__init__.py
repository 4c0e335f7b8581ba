"""EAGLE-3 drafter pipeline: wiring recorded once, serving configs derived from it, proven against the engine."""

from pipeline.engines.torchvision_ops import declare_on_import

__version__ = "0.1.0"

# Whatever the pipeline imports first, transformers may import torchvision behind it.
declare_on_import()
