"""Time one optimizer step of our training core: TTT forward, backward, clipping, AdamW with fp32 master weights.

    OMP_NUM_THREADS=2 python benchmarks/train_step.py --seq-len 1024 --ttt 7 --draft-vocab 8192 --dtype fp32

Flags, inputs, initial weights and the JSON line are those of `workload.py`, so that other trainers' steps can be put
beside it. The teacher's full-vocabulary argmax is worked out before the clock starts, since standardizing stores it.

Where definitions differ: at TTT step k other trainers count a row if the token it is scored at is in the loss mask; we
count it only if the target generated every token from the row's first one on, so step k has k rows fewer per answer
(614 - k instead of 614 at the default shape). `kl_first` is therefore equal at step 0 and close at later steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.products import fast_fp32  # noqa: E402
from pipeline.target import OutputHead  # noqa: E402
from pipeline.train.alignment import PackedBatch  # noqa: E402
from pipeline.train.allocator import keep_freed_memory  # noqa: E402
from pipeline.train.drafter import Drafter, DrafterConfig, FrozenTarget  # noqa: E402


def build_drafter(s: workload.Shape, d: dict, w: dict) -> Drafter:
    """A drafter with the workload's initial weights."""
    ids = torch.from_numpy(d["t2d"]).nonzero().squeeze(1)
    config = DrafterConfig(
        hidden_size=s.hidden, intermediate_size=s.intermediate, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, head_dim=s.head_dim, vocab_size=s.target_vocab,
        draft_vocab_size=s.draft_vocab, max_position_embeddings=8192, num_fc_inputs=s.aux,
    )  # fmt: skip
    drafter = Drafter(config, ids)
    drafter.init_weights(0, torch.from_numpy(w["lm_head"]))
    attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
    linears = {
        "fc": drafter.fc, "q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj,
        "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj,
    }  # fmt: skip
    with torch.no_grad():
        for name, linear in linears.items():
            linear.weight.copy_(torch.from_numpy(w[name]))
    return drafter


def build_batch(s: workload.Shape, d: dict, dtype: torch.dtype, device: str) -> tuple[PackedBatch, torch.Tensor]:
    """The workload as one sample, and the teacher's entropy [tokens] for reporting KL instead of cross entropy.

    The workload has shifted ids and teacher by one already, we shift them ourselves: one token more in front, and one
    behind for the last row to predict.
    """
    def pad(x: torch.Tensor, front: int, back: int) -> torch.Tensor:
        return torch.cat([x.new_zeros(front, *x.shape[1:]), x, x.new_zeros(back, *x.shape[1:])])

    final, lm_head = torch.from_numpy(d["final_hidden"]), torch.from_numpy(d["lm_head"]).to(device)
    logits = final.to(device) @ lm_head.T
    log_p = logits[:, torch.from_numpy(d["t2d"]).to(device)].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).cpu()
    mask = pad(torch.from_numpy(d["loss_mask"]), 1, 1)
    mask[-1] = True
    batch = PackedBatch(
        input_ids=pad(torch.from_numpy(d["input_ids"]), 1, 1),
        features=pad(torch.from_numpy(d["aux_hidden"]), 0, 2).to(dtype),
        final_hidden=pad(final, 1, 1).to(dtype),
        loss_mask=mask,
        teacher_argmax=pad(logits.argmax(-1).int().cpu(), 1, 1),
        sample_lengths=torch.tensor([s.seq_len + 2]),
    )
    return batch.to(torch.device(device)), pad(entropy, 1, 1)


def main() -> None:
    args = workload.parser(__doc__).parse_args()
    s = workload.shape_of(args)
    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    d = workload.make_inputs(s, args.seed)
    drafter = build_drafter(s, d, workload.make_draft_weights(s, d["lm_head"], d["t2d"], args.seed)).to(args.device)
    batch, entropy = build_batch(s, d, dtype, args.device)
    head = OutputHead(torch.from_numpy(d["lm_head"][d["t2d"]]).to(dtype), torch.ones(s.hidden), 1e-5)
    target = FrozenTarget(torch.from_numpy(d["embed"]).to(dtype), head).to(torch.device(args.device))
    del d
    rows = drafter.select_rows(batch, s.ttt)
    entropy_sums = (entropy[rows.tokens, None] * rows.used).sum(0).to(args.device)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
    step_weights = args.decay ** torch.arange(s.ttt) / rows.loss_rows

    def step() -> tuple[float, list[float]]:
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            out = drafter(batch, target, step_weights)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()  # where our trainer does; speculators' own does it after the next forward
        kl = (out.metrics["loss_sum"] - entropy_sums) / rows.loss_rows.to(args.device)
        return out.loss.item(), kl.tolist()

    trainable = round(sum(p.numel() for p in drafter.parameters()) / 1e6, 2)
    if args.device == "cpu":
        keep_freed_memory()  # not before: what the set-up frees would count as memory held before the first step
    with fast_fp32(args.device):
        workload.measure(args, "ours", step, train_lm_head=True, teacher_vocab=s.draft_vocab,
                         extra={"torch": torch.__version__, "trainable_m": trainable})  # fmt: skip


if __name__ == "__main__":
    main()
