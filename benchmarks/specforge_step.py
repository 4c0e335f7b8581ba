"""One EAGLE-3 training step of the pip-installed SpecForge, timed.

SpecForge's own loss is a Triton kernel, so on a CPU this script puts an eager torch loss with
the same value and gradient in its place before the import. Nothing else is replaced.
"""

import importlib.metadata
import sys
import types
import warnings

import workload

warnings.filterwarnings("ignore")


def install_cpu_loss(compiled):
    import torch

    def soft_cross_entropy(logits, target_p, position_mask):
        logp = torch.nn.functional.log_softmax(logits.float(), dim=-1)
        per_row = (target_p * logp).sum(-1, keepdim=True)
        return -(position_mask * per_row).mean()

    fn = torch.compile(soft_cross_entropy) if compiled else soft_cross_entropy
    stub = types.ModuleType("specforge.core.loss")
    stub.LogSoftmaxLoss = type("LogSoftmaxLoss", (), {"apply": staticmethod(fn)})
    sys.modules["specforge.core.loss"] = stub


def main():
    p = workload.parser(__doc__)
    p.add_argument("--teacher", choices=["full", "compact"], default="full",
                   help="full: target logits over the whole vocabulary (the library's default); "
                        "compact: its option for offline training")
    p.add_argument("--loss", choices=["eager", "compiled"], default="eager")
    p.add_argument("--no-compile", action="store_true",
                   help="turn off the torch.compile decorators that the library ships with")
    args = p.parse_args()
    s = workload.shape_of(args)

    import torch
    import transformers

    if args.no_compile:
        torch._dynamo.config.disable = True
    if args.device == "cpu":
        install_cpu_loss(args.loss == "compiled")
    attention = "sdpa" if args.device == "cpu" else "flex_attention"
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    d = workload.make_inputs(s, args.seed)
    w = workload.make_draft_weights(s, d["lm_head"], d["t2d"], args.seed)

    cfg = workload.llama_config(s, pad_token_id=None)
    cfg.draft_vocab_size = s.draft_vocab
    cfg.pretraining_tp = 1
    draft = LlamaForCausalLMEagle3(cfg, attention_backend=attention)
    att, mlp = draft.midlayer.self_attn, draft.midlayer.mlp
    target = {
        "fc": draft.fc, "q": att.q_proj, "k": att.k_proj, "v": att.v_proj, "o": att.o_proj,
        "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj, "lm_head": draft.lm_head,
    }
    with torch.no_grad():
        for name, module in target.items():
            module.weight.copy_(torch.from_numpy(w[name]))
        draft.embed_tokens.weight.copy_(torch.from_numpy(d["embed"]))
        draft.t2d.copy_(torch.from_numpy(d["t2d"]))
        draft.d2t.copy_(torch.from_numpy(d["d2t"]))
        for name, prm in draft.named_parameters():
            if "norm" in name:
                prm.fill_(1.0)
    # The library's builder casts the whole drafter to the training dtype; the optimizer
    # holds fp32 masters.
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    draft.freeze_embedding()
    draft.to(args.device, dtype)
    model = OnlineEagle3Model(draft, length=s.ttt, attention_backend=attention)
    model.train()
    opt = BF16Optimizer(model, lr=args.lr, weight_decay=0.01, max_grad_norm=0.5,
                        total_steps=10**6, warmup_ratio=0.0)

    head = torch.nn.Linear(s.hidden, s.target_vocab, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(d["lm_head"]))
    head.requires_grad_(False).to(args.device, dtype)
    batch = {
        "input_ids": torch.from_numpy(d["input_ids"])[None],
        "hidden_states": torch.from_numpy(d["aux_hidden"])[None].to(dtype),
        "loss_mask": torch.from_numpy(d["loss_mask"]).long()[None, :, None],
        "attention_mask": torch.ones(1, s.seq_len, dtype=torch.long),
    }
    batch = {k: v.to(args.device) for k, v in batch.items()}
    final = torch.from_numpy(d["final_hidden"])[None].to(args.device, dtype)

    # Its loss is a cross-entropy averaged over all S rows; these turn it into the mean KL
    # over kept rows, for comparison only.
    mask = batch["loss_mask"][0, :, 0].bool()
    with torch.no_grad():
        logp = torch.log_softmax(torch.nn.functional.linear(final[0], head.weight[draft.t2d]).float(), -1)
        entropy = -(logp.exp() * logp).sum(-1)
    rows = [int(mask[k:].sum()) for k in range(s.ttt)]
    h_mean = [entropy[k:][mask[k:]].mean().item() for k in range(s.ttt)]
    del d, w, logp

    def step():
        if args.teacher == "compact":
            teacher = {"target": None, "target_hidden_for_compact": final, "target_head_weight": head.weight}
        else:
            teacher = {"target": head(final)}
        plosses = model(**batch, **teacher)[0]
        del teacher
        loss = sum(args.decay ** k * x for k, x in enumerate(plosses))
        loss.backward()
        opt.step()
        return loss.item(), [x.item() * s.seq_len / rows[k] - h_mean[k] for k, x in enumerate(plosses)]

    workload.measure(
        args, "specforge", step, train_lm_head=True, teacher_vocab=s.target_vocab,
        extra={
            "variant": f"teacher={args.teacher},loss={args.loss},compile={not args.no_compile}",
            "version": importlib.metadata.version("specforge"),
            "torch": torch.__version__, "transformers": transformers.__version__,
            "trainable_m": round(sum(x.numel() for x in model.parameters() if x.requires_grad) / 1e6, 2),
        })


if __name__ == "__main__":
    main()
