"""Checkpoints: everything comes back bit for bit, and nothing half-written is taken for whole."""


import errno

import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.train.checkpoint import is_whole, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(4), torch.nn.Linear(4, 3, bias=False)
        self.register_buffer("d2t", torch.arange(3))

    def forward(self, x):
        return self.fc(self.norm(x))


def make(seed: int):
    torch.manual_seed(seed)
    net = Net()
    norms, matrices = [p for p in net.parameters() if p.ndim == 1], [p for p in net.parameters() if p.ndim > 1]
    # As in training: the optimizer's order of parameters is not the module's.
    return net, torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
                                  lr=0.1, fused=True)


def train(net, optimizer, steps: int, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        net(torch.randn(5, 4, generator=rng)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_continues_bit_for_bit(tmp_path):
    net, optimizer = make(0)
    train(net, optimizer, 3)
    save_checkpoint(tmp_path, 3, net, optimizer, {"step": 3, "loss": 0.1})
    train(net, optimizer, 4, seed=1)

    other, other_optimizer = make(1)
    train(other, other_optimizer, 1)
    path = latest_checkpoint(tmp_path)
    assert load_checkpoint(path, other, other_optimizer) == {"step": 3, "loss": 0.1}
    train(other, other_optimizer, 4, seed=1)
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_same_state_same_bytes_and_no_pickle(tmp_path):
    for folder in ("a", "b"):
        net, optimizer = make(0)
        train(net, optimizer, 2)
        save_checkpoint(tmp_path / folder, 2, net, optimizer, {"step": 2})
    files = sorted(p.name for p in (tmp_path / "a" / "step-00000002").iterdir())
    assert files == ["complete.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    for name in files:
        a, b = ((tmp_path / folder / "step-00000002" / name).read_bytes() for folder in ("a", "b"))
        assert a == b


@pytest.mark.parametrize("damage", ["no complete.json", "truncated", "flipped", "file missing", "complete.json cut"])
def test_damaged_checkpoints_are_passed_over(tmp_path, damage, capsys):
    net, optimizer = make(0)
    train(net, optimizer, 1)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, net, optimizer, {"step": step})
    newest = tmp_path / "step-00000002"
    model = newest / "model.safetensors"
    if damage == "no complete.json":
        (newest / "complete.json").unlink()
    elif damage == "truncated":
        model.write_bytes(model.read_bytes()[:-1])
    elif damage == "flipped":
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    elif damage == "file missing":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "complete.json").write_text((newest / "complete.json").read_text()[:20])
    assert not is_whole(newest)
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    assert "step-00000002" in capsys.readouterr().out


def test_a_killed_save_leaves_nothing_that_counts(tmp_path, monkeypatch):
    import pipeline.train.checkpoint as module

    net, optimizer = make(0)
    train(net, optimizer, 1)
    save_checkpoint(tmp_path, 1, net, optimizer, {"step": 1})

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, net, optimizer, {"step": 2})
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    save_checkpoint(tmp_path, 2, net, optimizer, {"step": 2})
    assert latest_checkpoint(tmp_path).name == "step-00000002"


def test_a_full_disk_is_one_clear_error_and_is_not_filled_by_half_a_checkpoint(tmp_path, monkeypatch):
    import pipeline.train.checkpoint as module

    net, optimizer = make(0)
    save_checkpoint(tmp_path, 1, net, optimizer, {"step": 1})
    (tmp_path / ".tmp-step-00000009").mkdir()  # left by kill -9

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(PipelineError, match="disk is full"):
        save_checkpoint(tmp_path, 2, net, optimizer, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_keep_last_and_best(tmp_path):
    for step in (1, 2, 3, 4, 5):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune_checkpoints(tmp_path, 2, best=2)
    assert [p.name[-1] for p in sorted(tmp_path.iterdir())] == ["2", "4", "5"]
    prune_checkpoints(tmp_path, 1, best=None)
    assert [p.name[-1] for p in tmp_path.iterdir()] == ["5"]
