"""Which layers a stage works on, and the message when they are not what the run holds."""

import pytest

from pipeline.config import load_config
from pipeline.errors import PipelineError
from pipeline.manifest import DumpRecord, Manifest, StageRecord, bind_slots
from pipeline.slots import check_bound, check_trained, layers_to_bind, layers_to_dump, rebound
from tests.test_config import resolved
from tests.test_manifest import target


def config(*overrides):
    return load_config(resolved(*overrides))


def manifest(layers=(2, 30, 58), dumped=None):
    dump = DumpRecord(engine="sglang", engine_version="0.5.23", model_class="X", layers=list(dumped or layers),
                      requested_ids=list(layers), capture_points=[l + 1 for l in layers], dtype="bfloat16",
                      plugin_sha256="", probe_ids=[], fingerprints={})
    return Manifest(run="demo", target=target(num_layers=61), slots=bind_slots(list(layers), 8), dump=dump)


def test_a_new_run_takes_the_targets_default():
    assert layers_to_dump(config(), None) == ([1, 14, 26], [1, 14, 26])


def test_a_run_keeps_its_layers_unless_asked_otherwise():
    assert layers_to_dump(config("target=kimi_k25"), manifest((3, 30, 57)))[0] == [3, 30, 57]
    assert layers_to_dump(config("target=kimi_k25", "slots.layers=[4,30,57]"), manifest((3, 30, 57)))[0] == [4, 30, 57]


def test_more_layers_can_be_dumped_than_slots_use():
    slots, dumped = layers_to_dump(config("slots.layers=[2,15,26]", "dump.layers=[15,20,1]"), None)
    assert (slots, dumped) == ([2, 15, 26], [1, 2, 15, 20, 26])


def test_a_wider_dump_is_not_narrowed():
    held = manifest((2, 30, 58), dumped=(2, 14, 30, 58))
    assert layers_to_dump(config("target=kimi_k25", "slots.layers=[2,14,58]"), held) == ([2, 14, 58], [2, 14, 30, 58])


def test_binding_a_layer_that_was_not_dumped_names_slot_both_values_and_command():
    with pytest.raises(PipelineError) as e:
        layers_to_bind(config("target=kimi_k25", "slots.layers=[3,30,58]"), manifest())
    assert "slot fc.0 holds layer output 2, you asked for 3" in str(e.value)
    assert e.value.fix == 'make dump RUN=demo ARGS="slots.layers=[3,30,58]"'


def test_rebinding_works_when_the_layer_was_dumped():
    held = manifest((2, 30, 58), dumped=(2, 14, 30, 58))
    assert layers_to_bind(config("target=kimi_k25", "slots.layers=[2,14,58]"), held) == [2, 14, 58]
    assert layers_to_bind(config("target=kimi_k25"), held) == [2, 30, 58]


def test_training_on_other_layers_than_bound_is_refused_with_the_command_that_binds_them():
    held = manifest((2, 30, 58), dumped=(2, 14, 30, 58))
    check_bound(config("target=kimi_k25"), held)
    check_bound(config("target=kimi_k25", "slots.layers=[2,30,58]"), held)
    with pytest.raises(PipelineError, match="fc.1 holds layer output 30, you asked for 14") as e:
        check_bound(config("target=kimi_k25", "slots.layers=[2,14,58]"), held)
    assert "make standardize" in e.value.fix
    with pytest.raises(PipelineError, match="3 fc slots .*, you asked for 2") as e:
        check_bound(config("target=kimi_k25", "slots.layers=[5,58]"), held)
    assert "make dump" in e.value.fix


@pytest.mark.parametrize("layers", ["[5,5,9]", "[9,5]", "[-1,2,30]", "[3]", "[2,30,61]", "[2,30,60]", "[]"])
def test_impossible_layers_are_refused_before_anything_starts(layers):
    with pytest.raises(PipelineError) as e:
        layers_to_dump(config("target=kimi_k25", f"slots.layers={layers}"), None)
    assert e.value.field == "slots.layers"


def test_rebinding_keeps_what_is_known_of_the_dumped_tensors():
    held = manifest((2, 30, 58), dumped=(2, 14, 30, 58))
    for slot in held.slots.values():
        slot.equals_transformers = True
    slots = rebound(held, [2, 14, 58])
    assert [slots[f"fc.{i}"].layer for i in range(3)] == [2, 14, 58]
    assert [slots[f"fc.{i}"].equals_transformers for i in range(3)] == [True, None, True]
    held.slots["fc.2"].equals_transformers = False  # then an uncompared layer of the same dump is not trusted either
    assert rebound(held, [2, 14, 58])["fc.1"].equals_transformers is False
    assert slots["fc.1"].columns == (8, 16) and slots["teacher"] == held.slots["teacher"]


def test_a_drafter_trained_on_other_layers_than_bound_now_is_not_exported():
    held = manifest((2, 14, 58), dumped=(2, 14, 30, 58))
    held.stages["train"] = StageRecord(config={"layers": [2, 30, 58]}, config_sha256="", inputs={}, outputs=[], versions={},
                                       git_commit=None, seed=0, wall_seconds=0, peak_memory_gib=0, finished_at="")
    with pytest.raises(PipelineError, match=r"trained on layer outputs \[2, 30, 58\], the slots hold \[2, 14, 58\]") as e:
        check_trained(held)
    assert e.value.fix == "make train RUN=demo"
    held.slots = bind_slots([2, 30, 58], 8)
    check_trained(held)


def test_slots_that_standardize_did_not_bind_are_refused():
    held = manifest((2, 14, 58), dumped=(2, 14, 30, 58))
    held.stages["standardize"] = StageRecord(config={"layers": [2, 30, 58]}, config_sha256="", inputs={}, outputs=[],
                                             versions={}, git_commit=None, seed=0, wall_seconds=0, finished_at="")
    with pytest.raises(PipelineError, match="standardize bound layer outputs") as e:
        check_bound(config("target=kimi_k25"), held)
    assert e.value.fix == "make standardize"
