"""What a finished dump is held against: its own probes, and for small targets transformers.

Errors are means over rows of |found - expected| / |expected|. A norm over all rows would see little else than the first
token, whose state is hundreds of times larger than the others in many targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pipeline.errors import PipelineError
from pipeline.manifest import Slot
from pipeline.store import HiddenStore
from pipeline.target import Target

# Largest error that is rounding. Measured on SmolLM2, SGLang against transformers on a CPU, worst layer: fp32 1.3e-6,
# bf16 2.3e-2. The nearest neighbouring layer is 2.2e-1 away.
_PROBE_BOUND, _REFERENCE_BOUND = {torch.float32: 1e-4}, {torch.float32: 1e-3}
_BOUND_16 = 7e-2  # bf16 and fp16; two batch compositions may differ as much as two implementations
_SMALL_BYTES = 2_000_000_000  # of weights: what transformers loads and computes within seconds
_COMPARED_SAMPLES = 2


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean over rows of |found - expected| / |expected|; both [T, H]."""
    found, expected = found.float(), expected.float()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)).mean().item()


def rounding_bound(*dtypes: torch.dtype) -> float:
    """Largest relative error that is rounding, between the same computation in these types."""
    return max(_REFERENCE_BOUND.get(dtype, _BOUND_16) for dtype in dtypes)


def check_probes(store: HiddenStore, probes: dict[str, torch.Tensor], states: Sequence[str]) -> None:
    """A probe sample was computed twice, with every layer captured and with a few: its rows must agree.

    Args:
        probes: `<sample id>/<tensor name>` → [T, H].
        states: names of the tensors in the shards.

    Raises:
        PipelineError: they do not.
    """
    for ref in store.samples:
        for name in states if f"{ref.id}/{states[0]}" in probes else []:
            rows, probe = store.rows(ref, name), probes[f"{ref.id}/{name}"]
            bound = _PROBE_BOUND.get(rows.dtype, _BOUND_16)
            if rows.shape != probe.shape or not (error := relative_error(rows, probe)) <= bound:
                found = f"{list(rows.shape)} and {list(probe.shape)}" if rows.shape != probe.shape else f"{error:.1e}"
                raise PipelineError(
                    f"the probe of sample {ref.id!r} differs from its rows in the shard: {name}",
                    field=f"dump/{store.paths[ref.shard].name}: {name}",
                    value=f"{found}, at most {bound:g} is rounding",
                    fix='make dump ARGS="force=true"; if it comes again: make dump ARGS="dump.engine=transformers"')


def compare_with_transformers(slots: dict[str, Slot], target: Target, probes: dict[str, torch.Tensor],
                              probe_ids: Sequence[str], *, dtype: torch.dtype, device: str) -> None:
    """Set `equals_transformers` of the slots by computing two probe samples with transformers, in the dump's dtype.

    It stays None for targets that are too large or quantized, or that transformers cannot load with its own code.
    """
    ids = list(probe_ids)[:_COMPARED_SAMPLES]
    if not ids or not is_small(target):
        return
    from pipeline.dump.reference import Reference

    try:
        reference = Reference(target.path, dtype=dtype, device=device)
    except (PipelineError, AttributeError):  # needs remote code; or its layers are not where they usually are
        return
    layers = [slot.layer for slot in slots.values() if slot.layer is not None]
    expected = {i: reference.states(probes[f"{i}/input_ids"].tolist(), layers) for i in ids}
    bound = rounding_bound(dtype)
    for name, slot in slots.items():
        error = max(relative_error(probes[f"{i}/{slot.tensor}"], expected[i][slot.tensor]) for i in ids)
        slot.equals_transformers, slot.relative_error = error <= bound, error
        if not slot.equals_transformers:
            print(f"dump: warning: slot {name}: the engine's {slot.tensor} differs from that of transformers by "
                  f"{error:.1e} (rounding is at most {bound:g}); a drafter trained on it is right for this engine only",
                  flush=True)


def mark_known_deviation(slots: dict[str, Slot], deviation: str | None) -> None:
    """Set `equals_transformers` to False in the fc slots that could not be compared, where the engine's class is known to
    deliver something else: what the export refuses must not hang on the size of the target."""
    for slot in slots.values():
        if deviation is not None and slot.kind == "layer_output" and slot.equals_transformers is None:
            slot.equals_transformers = False


def is_small(target: Target) -> bool:
    """Whether transformers loads and computes this target within seconds, in the precision the engine has."""
    weights = sum(path.stat().st_size for path in Path(target.path).glob("*.safetensors"))
    return not target.record.quantization and 0 < weights < _SMALL_BYTES
