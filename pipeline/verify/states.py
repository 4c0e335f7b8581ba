"""The states of the target that could arrive at a slot: a key each, and what people call it.

A key is `embedding`, `layer_output.13`, `final_hidden` (after the norm), or `normed.layer_output.13` (that layer output
after the target's final norm). Layer outputs and the final hidden are named as in the files of the dump.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.store import FINAL_HIDDEN, layer_output

EMBEDDING = "embedding"
NORMED = "normed."


def candidates(num_layers: int, normed: Sequence[int] = ()) -> list[str]:
    """Keys of all that could arrive: the embedding, every layer output, the final hidden, and the `normed` ones."""
    layers = [layer_output(layer) for layer in range(num_layers)]
    return [EMBEDDING, *layers, FINAL_HIDDEN, *(NORMED + layer_output(layer) for layer in normed)]


def describe(key: str, num_layers: int | None = None) -> str:
    """A key in words. With the target's `num_layers`, its last layer output is said to be the state before the norm."""
    if key == EMBEDDING:
        return "the embedding"
    if key == FINAL_HIDDEN:
        return "the final hidden state after the norm"
    if key.startswith(NORMED):
        return f"{describe(key.removeprefix(NORMED), num_layers)} after the final norm"
    last = num_layers is not None and key == layer_output(num_layers - 1)
    return f"layer output {short(key)}" + (" (the final hidden state before the norm)" if last else "")


def short(key: str) -> str:
    """A key as a label: E, 13, F, n13."""
    if key in (EMBEDDING, FINAL_HIDDEN):
        return "E" if key == EMBEDDING else "F"
    return key.replace(NORMED, "n").replace("layer_output.", "")
