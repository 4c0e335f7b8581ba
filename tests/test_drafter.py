"""The drafter equals speculators' model and itself under any packing; `test_exact` has the dense reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.target import OutputHead
from pipeline.train.alignment import PackedBatch
from pipeline.train.drafter import Drafter, DrafterConfig, FrozenTarget, TTTOutput

VOCAB, DRAFT_VOCAB, HIDDEN = 50, 30, 12
DECAY = 0.8


def make_drafter(dtype=torch.float32, seed=0, dropout=0.0, **changes) -> Drafter:
    config = DrafterConfig(**{
        "hidden_size": HIDDEN, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "max_position_embeddings": 64, **changes,
    })  # fmt: skip
    torch.manual_seed(seed)
    drafter = Drafter(config, torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values, dropout).to(dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            # Large enough for every term to matter; norms away from 1.
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return drafter


def make_samples(lengths: list[int], masks: list[list[bool]], n: int, dtype=torch.float32, seed=0) -> list[dict]:
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(0, VOCAB, (size,), generator=g),
            "features": torch.randn(size, n * HIDDEN, generator=g, dtype=torch.float64).to(dtype),
            "final_hidden": torch.randn(size, HIDDEN, generator=g, dtype=torch.float64).to(dtype),
            "loss_mask": torch.tensor(mask),
        }
        for size, mask in zip(lengths, masks, strict=True)
    ]


def target_matrices(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return tuple(torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))


def pack(samples: list[dict]) -> PackedBatch:
    lm_head = target_matrices(samples[0]["final_hidden"].dtype)[1]
    joined = {key: torch.cat([s[key] for s in samples]) for key in samples[0]}
    return PackedBatch(
        **joined,
        teacher_argmax=(joined["final_hidden"] @ lm_head.T).argmax(-1).int(),
        sample_lengths=torch.tensor([len(s["input_ids"]) for s in samples]),
    )


def draft_ids(drafter: Drafter) -> torch.Tensor:
    return drafter.t2d.nonzero().squeeze(1)


def frozen(drafter: Drafter) -> FrozenTarget:
    embedding, lm_head = target_matrices(drafter.fc.weight.dtype)
    return FrozenTarget(embedding, OutputHead(lm_head[draft_ids(drafter)], torch.ones(HIDDEN), 1e-5))


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, floor: float = 1e-2) -> None:
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=floor)


def forward(drafter: Drafter, batch: PackedBatch, target: FrozenTarget, steps: int) -> TTTOutput:
    """Each step's loss is averaged over the batch and weighs DECAY ** j."""
    loss_rows = drafter.select_rows(batch, steps).loss_rows
    return drafter(batch, target, DECAY ** torch.arange(steps) / loss_rows.clamp(min=1))


def test_the_loss_does_not_depend_on_packing():
    """One batch of 8 samples, and 8 of 1 whose gradients accumulate, give the same sums and gradients."""
    lengths = [5, 17, 9, 30, 2, 12, 8, 21]
    g = torch.Generator().manual_seed(3)
    masks = [(torch.rand(n, generator=g) < 0.8).tolist() for n in lengths]
    samples = make_samples(lengths, masks, 3)
    drafter, steps = make_drafter(), 4
    target = frozen(drafter)
    whole = forward(drafter, pack(samples), target, steps)
    whole.loss.backward()
    wanted = {name: p.grad.clone() for name, p in drafter.named_parameters()}

    drafter.zero_grad()
    loss_rows = sum(drafter.select_rows(pack([s]), steps).loss_rows for s in samples)
    step_weights = DECAY ** torch.arange(steps) / loss_rows
    parts = [drafter(pack([s]), target, step_weights) for s in samples]
    sum(p.loss for p in parts).backward()
    assert_close(sum(p.loss for p in parts).detach(), whole.loss.detach(), 1e-6)
    for name, total in whole.metrics.items():
        assert_close(sum(p.metrics[name] for p in parts), total, 1e-6)
    for name, parameter in drafter.named_parameters():
        assert_close(parameter.grad, wanted[name], 1e-5)


def test_a_sample_without_a_counting_row_changes_nothing():
    samples = make_samples([9, 6], [[True] * 9, [False] * 6], 3)
    drafter = make_drafter()
    both, one = (forward(drafter, pack(part), frozen(drafter), 3) for part in (samples, samples[:1]))
    assert torch.equal(both.loss, one.loss)


def test_a_batch_without_a_counting_row_has_zero_loss_and_a_gradient_for_every_parameter():
    """DDP waits for the gradient of every parameter."""
    drafter = make_drafter()
    out = forward(drafter, pack(make_samples([6], [[False] * 6], 3)), frozen(drafter), 3)
    out.loss.backward()
    assert out.loss == 0 and out.n_rows == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_a_counting_row_without_a_teacher_argmax_is_refused():
    """Taken for "outside the draft vocabulary" it would quietly be a miss."""
    drafter, batch = make_drafter(), pack(make_samples([6], [[True] * 6], 3))
    batch.teacher_argmax[0] = -1  # token 0 teaches no row
    drafter.select_rows(batch, 3)
    batch.teacher_argmax[4] = -1
    with pytest.raises(PipelineError, match="teacher argmax"):
        drafter.select_rows(batch, 3)


def test_bf16_autocast_is_near_fp32_and_keeps_fp32_gradients():
    samples = make_samples([40], [[True] * 40], 3)
    drafter = make_drafter()
    wanted = forward(drafter, pack(samples), frozen(drafter), 3).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = forward(drafter, pack(samples), frozen(drafter), 3).loss
    found.backward()
    assert abs(found - wanted) < 0.02 * wanted
    assert all(p.grad.dtype == torch.float32 for p in drafter.parameters())


def test_initialisation_depends_on_the_seed_only():
    first, second = make_drafter(), make_drafter(seed=1)
    rows = torch.randn(DRAFT_VOCAB, HIDDEN)
    for drafter in (first, second):
        torch.rand(3)
        drafter.init_weights(5, rows)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim == 1:
            assert (a == 1).all()
        elif name != "lm_head.weight":
            assert 0.01 < a.std() < 0.03
    assert torch.equal(first.lm_head.weight, rows)


def test_parameter_names_are_those_sglang_loads():
    names = [
        "fc.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
        *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"), "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")), "norm.weight", "lm_head.weight",
        "d2t", "t2d",
    ]  # fmt: skip
    state = make_drafter().state_dict()
    assert sorted(state) == sorted(names)
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(DRAFT_VOCAB) + state["d2t"], state["t2d"].nonzero().squeeze(1))


@pytest.mark.parametrize(
    "change", [{"num_key_value_heads": 3}, {"head_dim": 7}, {"draft_vocab_size": VOCAB + 1}, {"num_fc_inputs": 1}]
)
def test_impossible_shapes_are_refused(change):
    with pytest.raises(PipelineError, match=next(iter(change))):
        dataclasses.replace(make_drafter().config, **change)


@pytest.mark.parametrize("ids", [[1, 0], [0, 0], [0, VOCAB], [-1, 3], [0]])
def test_an_impossible_draft_vocabulary_is_refused(ids):
    config = dataclasses.replace(make_drafter().config, draft_vocab_size=2)
    with pytest.raises(PipelineError, match="draft vocabulary"):
        Drafter(config, torch.tensor(ids))


# -- an independent implementation --


@pytest.mark.slow
def test_equals_speculators():
    """speculators' Eagle3DraftModel with the same weights gives the same logits at every TTT step.

    It leaves the shift to its data loader: at step j its row i reads input_ids[i+j] and learns from final hidden [i+j].
    """
    import transformers
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    steps, size = 4, 24
    drafter = make_drafter()
    c = drafter.config
    layer = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=c.intermediate_size, num_hidden_layers=1,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps, max_position_embeddings=64, rope_parameters=dict(c.rope_parameters),
        tie_word_embeddings=False,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCAB, norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", default_proposal_method="greedy",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )  # fmt: skip
    model.load_vocab_mappings(drafter.t2d, drafter.d2t)
    embedding, lm_head = target_matrices()
    state = {name.replace("midlayer", "layers.0"): p for name, p in drafter.named_parameters()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
        model.verifier_lm_head.weight.copy_(lm_head[draft_ids(drafter)])
        model.verifier_norm.weight.fill_(1.0)

    sample = make_samples([size], [[True] * size], 3)[0]
    # Unit RMS, so that speculators' norm of the final hidden leaves it as it is.
    sample["final_hidden"] /= sample["final_hidden"].square().mean(-1, keepdim=True).sqrt()
    shown = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: shown.append(output[0].detach()))
    ours = drafter.unroll(pack([sample]), frozen(drafter), steps, drafter.select_rows(pack([sample]), steps))
    ours = drafter.lm_head(drafter.norm(ours))  # [T, N, Vd]
    rows = size - 1
    model(
        input_ids=sample["input_ids"][1:][None], hidden_states=sample["features"][:-1][None],
        verifier_last_hidden_states=sample["final_hidden"][1:][None], loss_mask=torch.ones(1, rows, dtype=torch.bool),
        document_ids=torch.zeros(1, rows, dtype=torch.long), position_ids=torch.arange(rows)[None], ttt_steps=steps,
        loss_config=resolve_loss_config("ce", "eager"),
    )  # fmt: skip
    for step in range(steps):
        valid = size - 2 - step  # rows that predict an existing token
        assert_close(ours[step, :valid].detach(), shown[step][:valid], 1e-5)


def test_dropout_is_of_training_alone():
    """The same masks from the same seed, others from another, none in validation."""
    plain, dropping = make_drafter(), make_drafter(dropout=0.5)
    batch = pack(make_samples([9, 7], [[False] * 3 + [True] * 6, [True] * 7], 3))
    target = frozen(plain)

    def loss(drafter: Drafter, seed: int) -> float:
        torch.manual_seed(seed)
        return forward(drafter, batch, target, 3).loss.item()

    assert loss(plain, 0) == loss(dropping.eval(), 0)
    dropping.train()
    assert loss(dropping, 0) == loss(dropping, 0) != loss(dropping, 1)
    assert loss(dropping, 0) != loss(plain, 0)


def test_dropout_keeps_means():
    """What is not set to 0 grows by 1 / (1 - p): the mean of fc's output over many draws is the output without."""
    drafter = make_drafter(dropout=0.3)
    features = torch.randn(1, 3 * HIDDEN)
    torch.manual_seed(0)
    mean = drafter.fc(drafter.dropout(features.expand(20_000, -1))).mean(0)
    torch.testing.assert_close(mean, drafter.fc(features)[0], rtol=0, atol=0.1)


def test_what_is_dropped():
    """fc's input, the embeddings of all rows and of the rows that count, and of each TTT step what two branches add."""
    drafter, seen = make_drafter(dropout=0.5), []
    for dropout in (drafter.dropout, drafter.midlayer.dropout):
        dropout.register_forward_hook(lambda module, inputs, output: seen.append((module, tuple(inputs[0].shape))))
    batch = pack(make_samples([9, 7], [[False] * 3 + [True] * 6, [True] * 7], 3))
    assert len(drafter.select_rows(batch, 3).index) == 10  # rounded up to 16
    forward(drafter, batch, frozen(drafter), 3)
    assert [shape for module, shape in seen if module is drafter.dropout][:2] == [(16, 3 * HIDDEN), (16, HIDDEN)]
    assert [shape for module, shape in seen if module is drafter.midlayer.dropout] == [(16, HIDDEN)] * 6
    assert len(seen) == 9
