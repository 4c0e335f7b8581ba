"""Where training starts and what steps it: first weights, scale of the slots, warm starts, 8-bit AdamW."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.manifest import bind_slots
from pipeline.target import load_output_head
from pipeline.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from pipeline.train.drafter import Drafter
from pipeline.train.drafter_config import DrafterConfig
from pipeline.train.optimizer import make_optimizer
from pipeline.train.start import scale_samples, slot_scale, start_weights
from pipeline.train.train import Trainer
from pipeline.train.warm_start import load_into, weights_digest
from pipeline.vocab import read_vocab
from tests.tiny_run import TinyRun
from tests.train_cases import again, as_served, base, change_dump, metrics, run, weights  # noqa: F401 (fixtures)


def trainer_of(run: TinyRun, **settings) -> Trainer:
    target, config = run.config(**settings)
    return Trainer(config, target, run.manifest, run.folder, run.folder / "train", "cpu")


SHAPE = DrafterConfig(
    hidden_size=4, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=4, vocab_size=16,
    draft_vocab_size=8, max_position_embeddings=32, num_fc_inputs=3)


def test_scale_of_slots_by_hand():
    """Rows of rms 3, 0.2 and 20: the powers of two next to 1/3, 5 and 1/20."""
    rows = torch.tensor([3.0, 0.2, 20.0]).repeat_interleave(4).repeat(5, 1)
    rows[:, ::2] *= -1
    rows[0] = 1e4  # the first token, where attention sinks
    rows[1, 0] = float("nan")
    assert slot_scale(SHAPE, rows) == slot_scale(SHAPE, rows.bfloat16()) == [1 / 4, 4.0, 1 / 16]
    assert scale_samples([500, 1500, 100]) == (0, 1) and scale_samples([5000, 1]) == (0,)
    later = torch.cat([rows[2:3].expand(2048, -1), 64 * rows[2:3].expand(9999, -1)])
    assert slot_scale(SHAPE, later) == [1 / 4, 4.0, 1 / 16]  # of a long sample the first rows
    for normed in ({"fc_norm": True}, {"norm_before_fc": True}):
        assert slot_scale(replace(SHAPE, **normed), rows) == [1.0] * 3


def test_fc_starts_as_the_last_slot():
    drafter = Drafter(SHAPE, torch.arange(8))
    start_weights(drafter, 0, torch.full((8, 4), 1.5))  # rows of norm 3
    features = torch.randn(7, 12)
    torch.testing.assert_close(drafter.fc(features), features[:, 8:], rtol=0, atol=0.05)
    assert not torch.equal(drafter.fc(features), features[:, 8:])
    torch.testing.assert_close(drafter.norm.weight, torch.full((4,), 1 / 3))
    start_weights(drafter, 0, torch.full((8, 4), 0.05))  # logits that are small are not made larger
    assert drafter.norm.weight.eq(1).all()


def test_a_layer_of_another_size_trains_alike(base, tmp_path):
    """One slot 64 times as large: the same losses bit for bit, and columns of fc exactly 64 times as small."""
    usual, large = again(base, tmp_path, "usual"), again(base, tmp_path, "large")
    change_dump(large, lambda tensors: tensors["layer_output.2"].mul_(64))
    for run in (usual, large):
        run.stage("train", **{"train.log_every": 1, "train.epochs": 2})
    assert metrics(usual) == metrics(large)
    expected = dict(weights(usual))
    width = expected["fc.weight"].shape[1] // 3
    expected["fc.weight"][:, width:2 * width] /= 64  # slots hold layer outputs 1, 2, 3
    for name, value in weights(large).items():
        assert torch.equal(value, expected[name]), name


def test_nothing_to_train_on_is_said(run):
    path = run.folder / "standardize" / "split.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"train": []}))
    with pytest.raises(PipelineError, match="no sample to train on"):
        trainer_of(run)


def test_starts_from_a_trained_drafter(run, tmp_path):
    trained = again(run, tmp_path, "trained")
    trained.stage("train")
    folder = trained.folder / "train"
    trainer = trainer_of(run, **{"train.init_from": str(folder)})
    for name, p in as_served(trained, dict(trainer.drafter.named_parameters())).items():
        assert torch.equal(p, weights(trained)[name]), name
    run.stage("train", **{"train.init_from": str(folder), "train.log_every": 1})
    assert metrics(run)[0]["mean_loss"] < metrics(trained)[0]["mean_loss"]


def test_rows_of_lm_head_go_to_their_tokens(run, tmp_path):
    trained = again(run, tmp_path, "trained")
    trained.stage("train")
    smaller = again(run, tmp_path, "smaller")
    smaller.stage("standardize", **{"drafter.draft_vocab_size": 32})
    theirs = read_vocab(trained.folder / "standardize" / "vocab.safetensors").target_ids().tolist()
    ours = read_vocab(smaller.folder / "standardize" / "vocab.safetensors").target_ids().tolist()

    trainer = trainer_of(smaller, **{"drafter.draft_vocab_size": 32, "train.init_from": str(trained.folder / "train")})
    for row, token in enumerate(ours):
        assert torch.equal(trainer.drafter.lm_head.weight[row], weights(trained)["lm_head.weight"][theirs.index(token)])

    smaller.stage("train", **{"drafter.draft_vocab_size": 32})  # and the other way round: half of the rows are new
    trainer = trainer_of(run, **{"train.init_from": str(smaller.folder / "train")})
    head = load_output_head(run.config()[0]).weight
    for row, token in enumerate(theirs):
        known = token in ours
        expected = weights(smaller)["lm_head.weight"][ours.index(token)] if known else head[token]
        assert torch.equal(trainer.drafter.lm_head.weight[row], expected)


def test_a_drafter_of_another_shape_or_wiring_is_refused(run, tmp_path):
    trained = again(run, tmp_path, "trained")
    trained.stage("train")
    folder = trained.folder / "train"
    with pytest.raises(PipelineError, match="its intermediate_size is 96, this run's 48"):
        trainer_of(run, **{"train.init_from": str(folder), "drafter.intermediate_size": 48})
    with pytest.raises(PipelineError, match="config.json cannot be read"):
        trainer_of(run, **{"train.init_from": str(tmp_path / "nothing")})
    trainer = trainer_of(run)
    other = run.manifest.model_copy(update={"slots": bind_slots([0, 1, 3], 64)})
    ids = read_vocab(run.folder / "standardize" / "vocab.safetensors").target_ids()
    with pytest.raises(PipelineError, match=r"its slots hold layer outputs \[1, 2, 3\], this run's \[0, 1, 3\]"):
        load_into(trainer.drafter, ids, folder, run.config()[0], other)


def test_a_warm_start_is_checked_before_anything_is_put_aside(run, tmp_path):
    run.stage("train")
    own = run.folder / "train"
    assert list(weights_digest(own, tmp_path / "other")) == ["drafter.safetensors"]
    with pytest.raises(PipelineError, match="no .*safetensors lie there"):
        weights_digest(tmp_path / "nothing", own)
    with pytest.raises(PipelineError, match="it writes there") as e:
        weights_digest(own / ".." / "train", own)
    assert "cp -r" in str(e.value)


def test_8_bit_moments_without_bitsandbytes(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(PipelineError, match="needs bitsandbytes") as e:
        run.stage("train", **{"train.optimizer": "adamw8bit"})
    assert "pip install" in str(e.value)
    with pytest.raises(PipelineError, match="cannot work on shards"):
        run.config(**{"train.optimizer": "adamw8bit", "train.parallel": "fsdp"})


def test_8_bit_moments_learn_and_continue_bit_for_bit(run, tmp_path):
    pytest.importorskip("bitsandbytes")
    c = run.config(**{"train.optimizer": "adamw8bit", "train.lr": 1e-2})[1].train

    def make(settings=c):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.RMSNorm(96),
                                  torch.nn.Linear(96, 64, bias=False))
        return net, make_optimizer(net, settings)

    def steps(net, optimizer, numbers) -> list[float]:
        losses = []
        for n in numbers:
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(n))
            loss = (net(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    whole, optimizer = make()
    losses = steps(whole, optimizer, range(60))
    assert optimizer.state[whole[0].weight]["state1"].dtype == torch.uint8  # 6144 elements
    plain = steps(*make(c.model_copy(update={"optimizer": "adamw"})), range(60))
    assert losses[-1] < 0.5 * losses[0] and losses[-1] == pytest.approx(plain[-1], rel=0.1)

    broken, optimizer = make()
    steps(broken, optimizer, range(20))
    save_checkpoint(tmp_path, 20, broken, optimizer, {})
    broken, optimizer = make()
    load_checkpoint(latest_checkpoint(tmp_path), broken, optimizer)
    assert steps(broken, optimizer, range(20, 60)) == losses[20:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, broken.state_dict()[name]), name
