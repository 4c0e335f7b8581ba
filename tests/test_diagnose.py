"""Diagnosis: drafters trained here, stripped of everything that says how they are wired, must give their wiring away."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.diagnose import wiring_search
from pipeline.diagnose.diagnose import diagnose
from pipeline.diagnose.diagnosed_run import in_project_order, probe_run
from pipeline.diagnose.foreign_drafter import ForeignDrafter, Reading, read_drafter, read_maps
from pipeline.diagnose.wiring_search import FusedStates, Variant
from pipeline.diagnose.wiring_verdict import Switch
from pipeline.errors import PipelineError
from pipeline.export.export import export, sglang_config
from pipeline.files import sha256_json
from pipeline.manifest import load_manifest
from pipeline.target import load_embedding
from pipeline.train.drafter import Drafter, MidLayer
from pipeline.train.drafter_config import DrafterConfig
from pipeline.verify.replay import ExportedDrafter
from pipeline.verify.replay_check import replay_check
from pipeline.verify.states import EMBEDDING
from pipeline.verify.wiring import Probe
from tests.tiny_run import TinyRun, tiny_run

H = 64
# The last epoch's weights, whatever they do on held-out samples: what was learned by heart depends sharply on its inputs.
SETTINGS = {"train.epochs": 150, "train.validate_every_epochs": 150, "train.lr": 5e-3, "train.batch_tokens": 64,
            "train.checkpoint_every": 10_000, "drafter.draft_vocab_size": 256,
            "drafter.init": "regression"}  # every slot counts from the start
# Layers as trained, and which of these slots comes first, second and third in the columns of the file.
WIRINGS = {"ascending": ([0, 2, 4], [0, 1, 2]), "last first": ([1, 3, 4], [2, 0, 1]), "turned": ([1, 2, 4], [2, 1, 0])}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TinyRun:
    """Every layer is dumped that can be a slot. The target's weights are large: its layers differ much."""
    return tiny_run(tmp_path_factory.mktemp("run"), samples=56, dumped=(0, 1, 2, 3, 4), std=0.3)


def trained(run: TinyRun, layers: list[int], **settings: object) -> Path:
    """A copy of the folder of stage 4."""
    settings = {**SETTINGS, "slots.layers": layers, **settings}
    kept = run.root / f"trained-{sha256_json(settings)[:12]}"
    if not kept.exists():
        run.stage("standardize", **settings)
        run.stage("train", **settings)
        shutil.copytree(run.folder / "train", kept)
    return kept


def strip(run: TinyRun, train: Path, out: Path, order: list[int], *, layout: str = "sglang", **changes: torch.Tensor) -> Path:
    """A trained drafter as a stranger would find it: no layer ids, no manifest, fc's slots in another order."""
    weights = load_file(train / "drafter.safetensors")
    parts = weights["fc.weight"].split(H, 1)
    weights["fc.weight"] = torch.cat([parts[i] for i in order], 1).contiguous()
    shape = DrafterConfig(**json.loads((train / "config.json").read_text()))
    config = sglang_config(shape, SimpleNamespace(ids=[]), dtype="float32", context=512, target_text=run.config()[0].text)
    del config["eagle_config"], config["num_aux_hidden_states"]
    if layout == "speculators":
        weights = {name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
        own = {"draft_vocab_size": config.pop("draft_vocab_size")}
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config, **own}
    out.mkdir(parents=True)
    save_file(weights | changes, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def diagnosed(run: TinyRun, draft: Path, name: str, **overrides: object):
    target, config = run.config(**{"diagnose.draft": str(draft), "diagnose.samples": str(run.folder / "prompts/samples.parquet"),
                                   "diagnose.max_samples": 56, **overrides})
    return diagnose(config, target, run.root / "runs" / name)


def found(verdict) -> list[str]:
    return [slot.best.removeprefix("layer_output.") for slot in verdict.slots]


@pytest.mark.slow
@pytest.mark.parametrize("name", WIRINGS)
def test_the_wiring_is_recovered_and_the_run_holds_the_same_drafter(run, tmp_path, name, capsys):
    layers, order = WIRINGS[name]
    original = trained(run, layers)
    layout = "speculators" if name == "turned" else "sglang"
    draft = strip(run, original, tmp_path / "unknown", order, layout=layout)
    verdict = diagnosed(run, draft, name.replace(" ", "-"))
    assert found(verdict) == [str(layers[i]) for i in order] and verdict.determined
    assert all(slot.margin.low > 0 for slot in verdict.slots)
    residual = verdict.switches["norm_before_residual"]
    assert not (residual.value and residual.determined)

    folder = run.root / "runs" / name.replace(" ", "-")
    manifest = load_manifest(folder)
    assert manifest.fc_layers() == layers  # ascending, whatever the file's order was
    said = manifest.stages["train"].config["diagnosed"]
    assert said["layers_as_stored"] == [layers[i] for i in order]
    assert said["fc_columns_permuted"] == (order != [0, 1, 2]) == ("put into ascending order" in capsys.readouterr().out)
    mine, theirs = (load_file(f / "drafter.safetensors") for f in (folder / "train", original))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)

    if name == "last first":  # and the later stages take it for a run like any other
        target, config = run.config(**{"export.engines": ["sglang"]})
        export(config, target, manifest, folder, folder / "export")
        assert json.loads((folder / "export/sglang/config.json").read_text())["eagle_config"][
            "eagle_aux_hidden_state_layer_ids"] == layers
        subject = SimpleNamespace(config=config, target=target, manifest=manifest, run_dir=folder, folder=folder,
                                  draft=folder / "export" / "sglang")
        assert replay_check(subject).problems == []


@pytest.mark.slow
def test_an_untrained_drafter_is_undetermined(run, tmp_path):
    train = trained(run, [1, 2, 3], **{"train.epochs": 1, "train.lr": 1e-9, "drafter.init": "identity"})
    noise = torch.empty(H, 3 * H).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    # As training starts, fc would be the last slot: that is something.
    draft = strip(run, train, tmp_path / "untrained", [0, 1, 2], **{"fc.weight": noise})
    with pytest.raises(PipelineError, match="undetermined"):
        diagnosed(run, draft, "untrained")
    folder = run.root / "runs" / "untrained"
    written = json.loads((folder / "diagnosis.json").read_text())
    assert not written["determined"] and written["why_undetermined"]
    assert set(load_manifest(folder).stages) == {"prompts", "dump"} and not load_manifest(folder).fc_slots()


@pytest.mark.slow
def test_target_ids_in_d2t_are_named_read_and_written_as_offsets(run, tmp_path, capsys):
    train = trained(run, [0, 2, 4])
    d2t = load_file(train / "drafter.safetensors")["d2t"]
    draft = strip(run, train, tmp_path / "absolute", [0, 1, 2], d2t=d2t + torch.arange(len(d2t)))
    verdict = diagnosed(run, draft, "absolute")
    assert verdict.reading.name == "d2t as target ids" and found(verdict) == ["0", "2", "4"]
    assert "problem: d2t as offsets: " in capsys.readouterr().out
    assert torch.equal(load_file(run.root / "runs/absolute/train/drafter.safetensors")["d2t"], d2t)


@pytest.mark.slow
def test_norm_before_residual_is_recognised(run, tmp_path, monkeypatch):
    plain = MidLayer.outputs
    with monkeypatch.context() as patched:  # as speculators' NormBeforeResidual has it: the residual is the normed hidden
        patched.setattr(MidLayer, "outputs", lambda self, attended, residual: plain(self, attended, self.hidden_norm(residual)))
        train = trained(run, [0, 2, 4], seed=1)
    # A factor on fc is normed away there, and is plain to see where the residual is the raw hidden.
    fc = 4 * load_file(train / "drafter.safetensors")["fc.weight"]
    draft = strip(run, train, tmp_path / "residual", [0, 1, 2], **{"fc.weight": fc})
    with pytest.raises(PipelineError, match="norm_before_residual.*SGLang does not have"):
        diagnosed(run, draft, "residual")
    written = json.loads((run.root / "runs/residual/diagnosis.json").read_text())
    assert written["switches"]["norm_before_residual"]["value"] and written["determined"]
    assert [slot["best"] for slot in written["slots"]] == ["layer_output.0", "layer_output.2", "layer_output.4"]


@pytest.mark.parametrize("fits, stated, determined, value, known", [
    (True, False, True, True, True),  # evidence outweighs what the files say
    (True, False, False, False, True),  # without evidence it is what they say
    (True, None, False, True, False),  # and where they say nothing, nothing is known
])
def test_a_switch_is_what_the_evidence_says_or_else_the_files(fits, stated, determined, value, known):
    switch = Switch.of(fits, stated, determined, None)
    assert (switch.value, switch.known) == (value, known)


def test_a_diagnosis_that_was_interrupted_in_the_dump_goes_on(run, tmp_path, monkeypatch):
    target, config = run.config(**{"diagnose.samples": str(run.folder / "prompts/samples.parquet"), "diagnose.max_samples": 2})

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("pipeline.diagnose.diagnosed_run.dump", interrupted)
        probe_run(config, target, tmp_path / "run")
    assert set(load_manifest(tmp_path / "run").stages) == {"prompts"}
    assert set(probe_run(config, target, tmp_path / "run").stages) == {"prompts", "dump"}


def test_a_run_of_its_own_is_not_overwritten(run, tmp_path):
    target, config = run.config()
    drafter = random_drafter(target)
    draft = save_drafter(drafter, tmp_path / "draft")
    with pytest.raises(PipelineError, match="a run of its own"):
        diagnosed(run, draft, run.folder.name)


# ---------------------------------------------------------------- reading others' files


def random_drafter(target, **switches: bool) -> Drafter:
    shape = DrafterConfig(hidden_size=H, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                          vocab_size=target.vocab_size, draft_vocab_size=32, max_position_embeddings=512, **switches)
    drafter = Drafter(shape, torch.arange(32) * 3)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (parameter.ndim == 1))
    return drafter


def save_drafter(drafter: Drafter, folder: Path, **config: object) -> Path:
    folder.mkdir()
    save_file(drafter.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"head_dim": 16, **config}))
    return folder


def test_what_a_config_leaves_out_comes_from_tensors_and_target(run, tmp_path):
    target, _ = run.config()
    drafter = random_drafter(target)
    folder = save_drafter(drafter, tmp_path / "draft", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
                          num_attention_heads=8)
    found = read_drafter(folder, target)
    shape = dataclasses.replace(drafter.config, max_position_embeddings=found.shape.max_position_embeddings,
                                rms_norm_eps=target.text.rms_norm_eps, rope_parameters=found.shape.rope_parameters)
    assert found.shape == shape and found.ids == [1, 2, 3] and found.slots == 3
    assert found.shape.rope_parameters["rope_theta"] == 10000.0
    assert any("num_attention_heads = 8, the weights 4" in note for note in found.notes)
    assert any("states no rope_theta" in note for note in found.notes)


def test_a_pickle_is_refused_with_the_command_that_converts_it(run, tmp_path):
    target, _ = run.config()
    drafter = random_drafter(target)
    folder = save_drafter(drafter, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(PipelineError, match="pickle.*can run code") as refused:
        read_drafter(folder, target)
    command = re.search(r'python -c "(.*)" \(', refused.value.fix)[1]
    import os
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True, env=os.environ)
    assert read_drafter(folder, target).slots == 3


@pytest.mark.parametrize("change, message", [
    ({"lm_head.weight": None}, "no lm_head.weight"),
    ({"fc.weight": torch.zeros(48, 144)}, "fc maps 144 to 48"),
    ({"midlayer.mlp.up_proj.weight": None}, "up_proj.weight is missing"),
    ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "q_norm.weight is no weight of a drafter"),
    ({"norm.weight": torch.full((H,), float("nan"))}, "norm.weight holds NaN"),
    ({"midlayer.self_attn.v_proj.weight": torch.ones(16, 2 * H)}, r"v_proj.weight has shape \[16, 128\]"),
])
def test_other_models_are_refused_by_name(run, tmp_path, change, message):
    target, _ = run.config()
    folder = save_drafter(random_drafter(target), tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    with pytest.raises(PipelineError, match=message):
        read_drafter(folder, target)


def test_maps_by_hand():
    """A vocabulary of 10, four draft tokens: 1, 4, 5, 8."""
    ids, t2d = torch.tensor([1, 4, 5, 8]), torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor([1, 4, 5, 8]), True)
    offsets = ids - torch.arange(4)  # 1, 3, 3, 5: as target ids one twice

    def names(d2t, marks, vocab=10):
        readings, problems = read_maps(d2t, marks, 4, vocab)
        return [r.name for r in readings], problems

    assert names(offsets, t2d) == (["d2t as offsets"], [])
    usable, problems = names(ids, t2d)  # target ids: as offsets 1, 5, 7, 11
    assert usable == ["d2t as target ids"]
    assert "1 of 4 draft ids lead outside of the target's 10 ids, e.g. to 11" in problems[0]
    usable, problems = names(offsets.flip(0), t2d)  # 5, 4, 5, 4
    assert usable == ["the ids that t2d marks"] and "2 of 4 draft ids lead to a target id that another one has" in problems[0]
    shuffled = torch.tensor([8, 1, 5, 4]) - torch.arange(4)
    usable, problems = names(shuffled, t2d)
    assert usable[0] == "d2t as offsets" and "the target ids do not ascend" in problems[0]
    assert names(offsets, t2d[:9]) == (["d2t as offsets"], ["t2d is over 9 target ids, the target has 10"])
    assert names(None, None)[0] == [] and "there is no d2t" in names(None, None)[1][0]
    assert names(None, None, vocab=4) == (["no map: the whole vocabulary"], [])
    other = torch.tensor([0, 1, 2, 3])  # a map of another vocabulary: in range, ascending, and not what t2d marks
    usable, problems = names(other * 0 + 2, t2d)
    assert usable == ["d2t as offsets", "the ids that t2d marks"] and "not the ids that t2d marks" in problems[0]


# ---------------------------------------------------------------- fc is linear


class States:
    """Stands for an opened probes file."""

    def __init__(self, states):
        self.states = states

    def get_tensor(self, name):
        return self.states[name]


def probe_of(layers: int, length: int = 7) -> Probe:
    torch.manual_seed(1)
    states = {f"s/layer_output.{i}": torch.randn(length, H) * (i + 1) for i in range(layers)}
    return Probe("s", torch.arange(length), torch.arange(2, length - 1), States(states))


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
@pytest.mark.parametrize("room", [1 << 27, H])
def test_sums_of_products_are_what_fc_computes(run, monkeypatch, switches, room):
    """Against the exported drafter's own fc over the concatenated states, also where products do not fit into memory."""
    monkeypatch.setattr(wiring_search, "_NUMBERS", room)
    target, _ = run.config()
    drafter = random_drafter(target, **switches)
    config = {**vars(drafter.config), "num_aux_hidden_states": 3}
    exported = ExportedDrafter.of(config, drafter.state_dict(), load_embedding(target))
    probe = probe_of(4)
    fused = FusedStates(exported, probe)
    for wiring in (("layer_output.0", "layer_output.2", "layer_output.3"), ("layer_output.3", EMBEDDING, "layer_output.0")):
        states = [exported.embedding[probe.ids] if s == EMBEDDING else probe.state(s) for s in wiring]
        expected = exported.fuse(torch.cat(states, -1)[:-1])
        torch.testing.assert_close(fused(wiring, Variant(**switches)), expected, rtol=1e-4, atol=1e-4)
        assert sum(p.numel() for p, _ in fused._products.values()) <= max(room, 6 * H)


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_permuted_columns_compute_the_same_from_permuted_states(run, switches):
    """And rows of lm_head in another order propose the same tokens."""
    target, _ = run.config()
    drafter = random_drafter(target, **switches)
    weights = {k: v for k, v in drafter.state_dict().items() if k not in ("d2t", "t2d")}
    foreign = ForeignDrafter(Path("x"), "sglang", drafter.config, weights, None, None, None, None)
    shuffled = torch.randperm(32, generator=torch.Generator().manual_seed(0)) * 3
    verdict = SimpleNamespace(reading=Reading("x", shuffled), switches={
        n: SimpleNamespace(value=switches.get(n, False)) for n in ("fc_norm", "norm_before_fc", "norm_output")})
    order = [2, 0, 1]
    shape, permuted, vocab = in_project_order(foreign, verdict, order, target.vocab_size)
    config = {**vars(shape), "num_aux_hidden_states": 3}
    maps = {"d2t": vocab.d2t, "t2d": vocab.t2d}
    ours = ExportedDrafter.of(config, permuted | maps, load_embedding(target))
    theirs = ExportedDrafter.of(config, weights | {"d2t": shuffled - torch.arange(32), "t2d": None}, load_embedding(target))
    assert (vocab.target_ids().diff() > 0).all() and vocab.t2d.nonzero().flatten().tolist() == sorted(shuffled.tolist())
    ids, states = torch.arange(9), torch.randn(9, 3 * H)
    parts = states.split(H, 1)
    rows = torch.arange(2, 8)
    drafts = [d.draft(ids, x, rows, 3, forced=False) for d, x in
              ((theirs, states), (ours, torch.cat([parts[i] for i in order], 1)))]
    assert torch.equal(*drafts)
