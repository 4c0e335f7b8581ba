"""The manifest is typed and versioned: unknown versions and fields are refused, slots say what they hold."""

import json

import pytest
from pydantic import ValidationError

from pipeline.errors import PipelineError
from pipeline.manifest import FileRecord, Manifest, Slot, TargetRecord, bind_slots, load_manifest, save_manifest


def target(**changes):
    facts = dict(path="/models/x", architecture="LlamaForCausalLM", num_layers=30, hidden_size=8, vocab_size=100,
                 dtype="bfloat16", config_sha256="c", tokenizer_sha256="t", chat_template_sha256="h")
    return TargetRecord(**(facts | changes))


def test_round_trip(tmp_path):
    manifest = Manifest(run="demo", target=target(), slots=bind_slots([1, 14, 26], 8))
    save_manifest(tmp_path, manifest)
    assert load_manifest(tmp_path) == manifest
    assert load_manifest(tmp_path / "elsewhere") is None


def test_slots_give_layers_and_columns_in_order():
    # Eleven slots: fc.10 comes after fc.9, not after fc.1.
    layers = list(range(3, 14))
    manifest = Manifest(run="demo", target=target(), slots=bind_slots(layers, 8))
    assert manifest.fc_layers() == layers
    assert [s.columns for s in manifest.fc_slots()][:2] == [(0, 8), (8, 16)]
    assert manifest.fc_slots()[10].columns == (80, 88)
    assert manifest.slots["teacher"].norm == "post"


@pytest.mark.parametrize("fields", [
    dict(kind="layer_output", tensor="x"), dict(kind="layer_output", layer=1, norm="post", columns=(0, 8), tensor="x"),
    dict(kind="final_hidden", tensor="x"), dict(kind="final_hidden", norm="post", layer=3, tensor="x"),
])
def test_a_slot_with_fields_of_the_other_kind_is_refused(fields):
    with pytest.raises(ValidationError):
        Slot(**fields)


@pytest.mark.parametrize("change, where", [
    (lambda m: m.update(version=2), "version"),
    (lambda m: m.pop("version"), "version"),
    (lambda m: m.update(colour="blue"), "colour"),
    (lambda m: m["target"].update(num_layer=3), "target.num_layer"),
    (lambda m: m["slots"]["fc.1"].update(layer="deep"), "slots.fc.1.layer"),
])
def test_what_a_reader_does_not_know_is_named(tmp_path, change, where):
    save_manifest(tmp_path, Manifest(run="demo", target=target(), slots=bind_slots([1, 14, 26], 8)))
    raw = json.loads((tmp_path / "manifest.json").read_text())
    change(raw)
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(PipelineError) as e:
        load_manifest(tmp_path)
    assert where in e.value.field and "mend" in str(e.value)


def test_a_truncated_manifest_is_one_message(tmp_path):
    save_manifest(tmp_path, Manifest(run="demo", target=target()))
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(PipelineError, match="not readable JSON"):
        load_manifest(tmp_path)


def test_file_records_see_missing_truncated_and_altered_files(tmp_path):
    path = tmp_path / "dump" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"12345678")
    record = FileRecord.of(tmp_path, path)
    assert record.path == "dump/a.bin" and record.problem(tmp_path) is None
    path.write_bytes(b"1234")
    assert "truncated" in record.problem(tmp_path)
    path.write_bytes(b"12345679")  # same size, another mtime
    assert "altered" in record.problem(tmp_path)
    path.unlink()
    assert "missing" in record.problem(tmp_path)


def test_the_full_check_finds_what_size_and_mtime_do_not_show(tmp_path):
    import os

    path = tmp_path / "a.bin"
    path.write_bytes(b"12345678")
    record = FileRecord.of(tmp_path, path)
    path.write_bytes(b"12345679")
    os.utime(path, ns=(record.mtime_ns, record.mtime_ns))
    assert record.problem(tmp_path) is None
    assert "altered" in record.problem(tmp_path, full=True)


def test_a_file_only_touched_is_unchanged(tmp_path):
    import os

    path = tmp_path / "a.bin"
    path.write_bytes(b"12345678")
    record = FileRecord.of(tmp_path, path)
    os.utime(path, ns=(1, 1))
    assert record.problem(tmp_path) is None


@pytest.mark.parametrize("edit", [
    lambda slots: slots["fc.1"].update(layer=15),                       # the tensor is still that of 14
    lambda slots: slots["fc.1"].update(tensor="layer_output.26"),
    lambda slots: slots["fc.1"].update(columns=[0, 8]),
    lambda slots: slots["fc.1"].update(layer=27, tensor="layer_output.27"),  # does not ascend
], ids=["layer", "tensor", "columns", "order"])
def test_slots_that_contradict_themselves_are_refused(tmp_path, edit):
    save_manifest(tmp_path, Manifest(run="demo", target=target(), slots=bind_slots([1, 14, 26], 8)))
    raw = json.loads((tmp_path / "manifest.json").read_text())
    edit(raw["slots"])
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(PipelineError, match="the manifest's slot fc"):
        load_manifest(tmp_path)
