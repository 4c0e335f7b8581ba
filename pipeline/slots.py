"""Which layer outputs a stage works on: what the user asked for, what the run holds, what the target's default is."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.layers.layer_ids import check_layers, default_layers
from pipeline.manifest import Manifest, Slot, bind_slots


def layers_to_dump(config: Config, manifest: Manifest | None) -> tuple[list[int], list[int]]:
    """(layers for the fc slots, all layers to dump), both ascending, as layer outputs.

    Without `slots.layers` the run keeps the layers it has; a new run takes the target's default. A dump that already
    holds all that is wanted is not narrowed: its slots can be re-bound by `make standardize`.
    """
    asked = config.slots.layers
    if asked is None:
        asked = ((manifest and manifest.fc_layers()) or config.target.slots_layers
                 or default_layers(config.target.num_layers))
    slots = list(check_layers(asked, config.target.num_layers))
    wanted = sorted({*slots, *(config.dump.layers or [])})
    check_layers(wanted, config.target.num_layers)
    if manifest and manifest.dump and set(wanted) <= set(manifest.dump.layers):
        wanted = manifest.dump.layers
    return slots, wanted


def layers_to_bind(config: Config, manifest: Manifest) -> list[int]:
    """Layers for the fc slots at `make standardize`: asked for on the command line, else what the run's slots hold.

    Raises:
        PipelineError: a layer that was not dumped.
    """
    asked = manifest.fc_layers() if config.slots.layers is None else config.slots.layers
    asked = list(check_layers(asked, config.target.num_layers))
    dumped = manifest.dump.layers if manifest.dump else []
    if missing := [layer for layer in asked if layer not in dumped]:
        raise _mismatch(asked, manifest, f"layer output {missing[0]} was not dumped (dumped: {dumped})", "dump")
    return asked


def rebound(manifest: Manifest, layers: list[int]) -> dict[str, Slot]:
    """Slots for other dumped layers; what is known of a dumped tensor, and how the teacher was dumped, stays."""
    slots = bind_slots(layers, manifest.target.hidden_size)
    known = {slot.tensor: slot for slot in manifest.slots.values()}
    # A layer that was not compared is no better than one of the same dump that was found to differ.
    unknown = False if False in (slot.equals_transformers for slot in manifest.fc_slots()) else None
    for slot in slots.values():
        if slot.tensor in known:
            slot.equals_transformers = known[slot.tensor].equals_transformers
            slot.relative_error = known[slot.tensor].relative_error
        else:
            slot.equals_transformers = unknown
    return slots | {"teacher": manifest.slots["teacher"]}


def check_bound(config: Config, manifest: Manifest | None) -> None:
    """Refuse `slots.layers` that differ from what the run's slots hold (train, export, verify)."""
    asked = config.slots.layers
    if manifest is not None and manifest.slots and asked is not None and asked != manifest.fc_layers():
        dumped = manifest.dump.layers if manifest.dump else []
        stage = "standardize" if set(asked) <= set(dumped) else "dump"
        raise _mismatch(asked, manifest, "the run's slots are bound to other layers", stage)
    bound = manifest.stages.get("standardize") if manifest is not None else None
    if bound is not None and bound.config["layers"] != manifest.fc_layers():
        raise PipelineError(f"stage standardize bound layer outputs {bound.config['layers']}, the manifest's slots hold "
                            f"{manifest.fc_layers()}", field="slots", value=manifest.fc_layers(), fix="make standardize")


def check_trained(manifest: Manifest) -> None:
    """Refuse to export or verify a drafter that was trained on other layers than the slots hold now."""
    trained = manifest.stages["train"].config["layers"]
    if trained != manifest.fc_layers():
        raise PipelineError(f"the drafter was trained on layer outputs {trained}, the slots hold {manifest.fc_layers()} now",
                            field="stages.train.config.layers", value=trained, fix=f"make train RUN={manifest.run}")


def _mismatch(asked: list[int], manifest: Manifest, what: str, stage: str) -> PipelineError:
    held = manifest.fc_layers()
    if len(held) != len(asked):
        where = f"the run has {len(held)} fc slots {held}, you asked for {len(asked)}"
    else:
        slot = next((i for i, (a, h) in enumerate(zip(asked, held)) if a != h), 0)
        where = f"slot fc.{slot} holds layer output {held[slot]}, you asked for {asked[slot]}"
    return PipelineError(f"{where}: {what}", field="slots.layers", value=asked,
                         fix=f'make {stage} RUN={manifest.run} ARGS="slots.layers={str(asked).replace(" ", "")}"')
