"""EAGLE-3 drafter pipeline: wiring recorded once, serving configs derived from it, proven against the engine."""

__version__ = "0.1.0"
