"""Overfit a drafter on a few sequences, export it, serve it in the real SGLang: it must accept nearly everything.

A drafter that knows its sequences by heart and is served at 1.5 instead of 4 is the sign of training and serving not
being the same function (EAGLE 340, 264): features, shifts, rope, norms and vocabulary map all have to agree. Accept
length does not show an off-by-one in the layers, so the replay's counters are compared with the engine's, one by one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import Config
from pipeline.dump.reference import Reference
from pipeline.engines.engine import prepare_environment
from pipeline.export.export import write_sglang
from pipeline.export.serving import write_serving
from pipeline.layers.layer_ids import derive_sglang_ids
from pipeline.manifest import EngineExport, ExportRecord, Manifest, bind_slots
from pipeline.samples import Sample, write_samples
from pipeline.store import FINAL_HIDDEN, layer_output
from pipeline.target import Target, load_embedding, load_output_head, open_target
from pipeline.train.drafter import Drafter, FrozenTarget, PackedBatch
from pipeline.train.drafter_config import drafter_config
from pipeline.verify.checks import Subject
from pipeline.verify.replay import ExportedDrafter
from pipeline.verify.serve_check import serve, serve_check
from pipeline.verify.served import KNOWN_CAUSES, Served, compare, redump, replay_served
from tests.tiny_models import tiny_llama
from tests.tiny_run import tiny_config

pytestmark = pytest.mark.slow
LAYERS, STEPS, SERVED = [0, 2, 4], 3, 72
TRAINED = SERVED + 2 * STEPS  # the engine drafts past the length limit, and counts what it accepts there


@dataclass
class Overfitted:
    target: Target
    config: Config
    export: Path
    """folder of sglang/, serving.yaml and the launch script"""
    prompts: list[list[int]]
    served: list[Served]


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory) -> Overfitted:
    """Both engine starts of this file but the server's."""
    prepare_environment("cpu", threads=2)
    root = tmp_path_factory.mktemp("overfit")
    target, config = open_target(
        tiny_config(
            tiny_llama(root / "target"),
            root,
            **{"drafter.draft_vocab_size": 256, "slots.layers": LAYERS, "target.slots_layers": LAYERS},
        )
    )
    sequences, prompts = greedy_sequences(target, count=4)
    drafter, draft_config = overfit(config, target, sequences, prompts)
    folder = root / "export"
    ids = derive_sglang_ids(target.path, LAYERS)
    weights = {k: v.detach().cpu() for k, v in drafter.state_dict().items()}
    write_sglang(folder / "sglang", draft_config, weights, ids, dtype="float32", context=2048, target_text=target.text)
    record = ExportRecord(
        engines={
            "sglang": EngineExport(
                version=ids.version,
                ids=list(ids.ids),
                proven=ids.proven,
                capture_points=list(ids.capture_points),
                rule_source=ids.rule_source,
            )
        }
    )
    manifest = Manifest(run="overfit", target=target.record, slots=bind_slots(LAYERS, target.hidden_size))
    write_serving(folder, config, target, manifest, record, {}, device="cpu")
    served = serve(
        target.path,
        folder / "sglang",
        prompts,
        tokens=SERVED,
        steps=STEPS,
        options={"device": "cpu", "dtype": "float32"},
    )
    return Overfitted(target, config, folder, prompts, served)


def greedy_sequences(target: Target, *, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of six tokens and the target's own greedy continuations, none of which ends early."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    found, prompts, seed = [], [], 0
    while len(found) < count:
        prompt = torch.randint(3, 400, (1, 6), generator=torch.Generator().manual_seed(seed))
        seed += 1
        out = model.generate(prompt, max_new_tokens=TRAINED, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0
        ].tolist()
        if not set(out[6:]) & set(target.eos_token_ids):
            found.append(out)
            prompts.append(out[:6])
    return found, prompts


def overfit(config, target, sequences, prompts):
    """A plain training loop over all sequences at once, until everything is known by heart."""
    reference = Reference(target.path, dtype=torch.float32)
    states = [reference.states(s, LAYERS) for s in sequences]
    final = torch.cat([s[FINAL_HIDDEN] for s in states])
    head = load_output_head(target)
    argmax = head.logits(final).argmax(-1)
    ids = torch.tensor(sum(sequences, []))
    draft_ids = torch.cat([ids, argmax, torch.arange(256)]).unique()
    known = torch.cat([ids, argmax]).unique()
    draft_ids = torch.cat([known, draft_ids[~torch.isin(draft_ids, known)]])[:256].sort().values
    shape = drafter_config(config, target, num_fc_inputs=len(LAYERS), draft_vocab_size=len(draft_ids))
    drafter = Drafter(shape, draft_ids)
    drafter.init_weights(0, head.weight[draft_ids])
    batch = PackedBatch(
        input_ids=ids,
        features=torch.cat([torch.cat([s[layer_output(layer)] for layer in LAYERS], -1) for s in states]),
        final_hidden=final,
        loss_mask=torch.cat([torch.arange(len(s)) >= len(p) for s, p in zip(sequences, prompts)]),
        teacher_argmax=argmax.int(),
        sample_lengths=torch.tensor([len(s) for s in sequences]),
    )
    # A random target is undecided; scaled up, its distribution says only which token it takes.
    frozen = FrozenTarget(load_embedding(target), replace(load_output_head(target, draft_ids), logit_scale=30.0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    weights = 0.8 ** torch.arange(STEPS) / drafter.select_rows(batch, STEPS).loss_rows
    for step in range(600):
        out = drafter(batch, frozen, weights)
        if torch.equal(out.metrics["prefix_hits"], out.metrics["gated"]) and step > 50:
            break
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert torch.equal(out.metrics["prefix_hits"], out.metrics["gated"]), out.metrics
    return drafter, shape


def test_greedy_text_is_the_targets_own(overfitted):
    assert [s.output for s in overfitted.served] == [s.plain for s in overfitted.served]
    assert all(len(s.output) == SERVED for s in overfitted.served)


def test_accept_length_is_nearly_four(overfitted):
    cycles = sum(s.verifications for s in overfitted.served)
    assert 1 + sum(s.correct for s in overfitted.served) / cycles >= 3.9


def test_replay_equals_the_engines_counters(overfitted, tmp_path):
    target, drafter = (
        overfitted.target,
        ExportedDrafter(overfitted.export / "sglang", load_embedding(overfitted.target)),
    )
    manifest = Manifest(run="overfit", target=target.record)
    features = redump(overfitted.served, overfitted.config, target, manifest, LAYERS, tmp_path / "redump", exact=True)
    walks = replay_served(overfitted.served, features, drafter, steps=STEPS)
    result = compare(overfitted.served, walks, STEPS)
    assert result["counters_identical"], result
    for counter in ("cycles", "accepted", "accepted_per_position"):
        assert result[f"{counter}_engine"] == result[f"{counter}_replayed"]
    assert result[f"tau_walk@{STEPS}"] <= result["tau_replayed"]


def test_a_drafter_that_is_never_right_names_the_known_causes(overfitted, tmp_path):
    """Fit in form, but its vocabulary map sends every draft to a token that the target never says."""
    run = tmp_path / "run"
    draft = shutil.copytree(overfitted.export / "sglang", run / "export" / "sglang")
    weights = load_file(draft / "model.safetensors")
    unused = next(t for t in range(512) if all(t not in s.sequence for s in overfitted.served))
    weights["d2t"] = unused - torch.arange(len(weights["d2t"]))
    save_file(weights, draft / "model.safetensors")
    write_samples(
        run / "prompts" / "samples.parquet",
        [
            Sample(
                id=f"s{i}",
                split="heldout",
                category=None,
                messages=[],
                input_ids=s.prompt + s.output,
                loss_mask=[0] * len(s.prompt) + [1] * len(s.output),
                finish_reason="length",
            )
            for i, s in enumerate(overfitted.served)
        ],
    )
    slots = bind_slots(LAYERS, overfitted.target.hidden_size)
    for slot in slots.values():
        slot.equals_transformers = True
    manifest = Manifest(run="overfit", target=overfitted.target.record, slots=slots)
    section = overfitted.config.verify.model_copy(update={"serve_tokens": 12})
    config = overfitted.config.model_copy(update={"verify": section})
    result = serve_check(Subject(config, overfitted.target, manifest, run, tmp_path / "verify", draft))
    assert result.measured["tau_engine"] == result.measured["tau_replayed"] == 1.0 and result.problems == []
    assert result.measured["text_identical"] and result.measured["counters_identical"]
    assert result.notes == [KNOWN_CAUSES]


def test_the_launch_script_serves(overfitted):
    """The script as a user starts it: from another folder, with a bare environment and a port of its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = (overfitted.export / "server.log").open("w+")
    server = subprocess.Popen(
        [str(overfitted.export / "launch_sglang.sh"), "--port", str(port)],
        cwd="/",
        stdout=log,
        stderr=log,
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        request = {"input_ids": overfitted.prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": SERVED}}
        answer = json.loads(fetch(f"http://127.0.0.1:{port}/generate", request))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert answer["output_ids"] == overfitted.served[0].plain
    assert 1 + answer["meta_info"]["spec_num_correct_drafts"] / answer["meta_info"]["spec_verify_ct"] >= 3.9


def fetch(url: str, content: dict | None = None) -> bytes:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def wait_for(url: str, server: subprocess.Popen, log) -> None:
    for _ in range(240):
        if server.poll() is not None:
            log.seek(0)
            pytest.fail(f"the server ended: {log.read()[-3000:]}")
        try:
            fetch(url)
            return
        except OSError:
            time.sleep(0.5)
    log.seek(0)
    pytest.fail(f"the server did not answer: {log.read()[-3000:]}")
