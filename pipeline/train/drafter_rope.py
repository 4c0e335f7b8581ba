"""Which RoPE a drafter gets: its target's, as far as trainer and engines compute it alike.

A drafter's layer is its own. Engines rotate it as the drafter's config.json says, whatever the target does, so what
matters is that they rotate it as the trainer did. Three differences between transformers 5.19, SGLang 0.5.23 and vLLM:

* "dynamic" and "longrope": in transformers the frequencies follow the length of the sequence. SGLang has one table for
  all lengths ("dynamic"), or two, of which the longest request of a batch chooses ("longrope").
* "yarn" multiplies cos and sin by a factor. SGLang reads mscale and mscale_all_dim but not attention_factor; vLLM
  before PR 48351 reads neither. Both of these read attn_factor, which transformers does not.
* partial_rotary_factor: engines rotate the heads of a Llama layer, which the drafter's is, whole.
"""

from __future__ import annotations

import math
from typing import Any

COMPUTED_ALIKE = ("default", "linear", "llama3", "yarn")


def drafter_rope(target: dict[str, Any]) -> dict[str, Any]:
    """transformers' `rope_parameters` for the drafter of a target that has these.

    A type that is not computed alike becomes "default" with the target's theta: the drafter learns with what it is
    served with. Up to the target's context length, "dynamic" is exactly that.
    """
    rope = {name: value for name, value in target.items() if name != "partial_rotary_factor"}
    kind = rope.get("rope_type", "default")
    if kind not in COMPUTED_ALIKE:
        return {"rope_type": "default", **{name: value for name, value in rope.items() if name == "rope_theta"}}
    return _yarn(rope) if kind == "yarn" and rope.get("factor") else rope


def _yarn(rope: dict[str, Any]) -> dict[str, Any]:
    """The same YaRN in a spelling that all three read alike: a factor other than YaRN's own is stated twice."""
    rope = dict(rope)
    mscale, mscale_all_dim, stated, _ = (
        rope.pop(name, None) for name in ("mscale", "mscale_all_dim", "attention_factor", "attn_factor")
    )

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if stated is None:
        stated = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
    if not math.isclose(stated, magnitude(1.0)):
        rope |= {"attention_factor": float(stated), "attn_factor": stated / magnitude(1.0)}
    return rope
