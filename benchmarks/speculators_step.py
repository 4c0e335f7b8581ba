"""One EAGLE-3 training step of the pip-installed speculators, timed."""

import contextlib
import sys
import warnings
from pathlib import Path

import workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pipeline  # noqa: E402, F401: PyPI's torchvision can be imported beside a CPU build of torch after this

warnings.filterwarnings("ignore")


def main():
    p = workload.parser(__doc__)
    p.add_argument("--attn", choices=["sdpa", "eager", "simple_flex_attention"],
                   help="sdpa on a CPU, where flex attention and the fused loss do not run; else what the library ships")
    args = p.parse_args()
    args.attn = args.attn or ("sdpa" if args.device == "cpu" else "simple_flex_attention")
    s = workload.shape_of(args)

    import speculators
    import torch
    import transformers
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    d = workload.make_inputs(s, args.seed)
    w = workload.make_draft_weights(s, d["lm_head"], d["t2d"], args.seed)

    layer = workload.llama_config(s)
    layer._attn_implementation = args.attn
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=s.draft_vocab, norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(range(s.aux)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=s.ttt)],
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    ))
    t2d, d2t = torch.from_numpy(d["t2d"]), torch.from_numpy(d["d2t"])
    model.load_vocab_mappings(t2d, d2t)
    att, mlp = model.layers[0].self_attn, model.layers[0].mlp
    target = {
        "fc": model.fc, "q": att.q_proj, "k": att.k_proj, "v": att.v_proj, "o": att.o_proj,
        "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj, "lm_head": model.lm_head,
    }
    with torch.no_grad():
        for name, module in target.items():
            module.weight.copy_(torch.from_numpy(w[name]))
        model.verifier_lm_head.weight.copy_(torch.from_numpy(w["lm_head"]))
        model.embed_tokens.weight.copy_(torch.from_numpy(d["embed"]))
        for name, prm in model.named_parameters():
            if "norm" in name:
                prm.fill_(1.0)
    model.to(args.device).train()

    # The library's own trainer keeps fp32 weights, feeds hidden states in the chosen dtype
    # and runs forward under autocast; its loss is outside.
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    batch = {
        "input_ids": torch.from_numpy(d["input_ids"])[None],
        "hidden_states": torch.from_numpy(d["aux_hidden"])[None].to(dtype),
        "verifier_last_hidden_states": torch.from_numpy(d["final_hidden"])[None].to(dtype),
        "loss_mask": torch.from_numpy(d["loss_mask"])[None],
        "document_ids": torch.zeros(1, s.seq_len, dtype=torch.long),
        "position_ids": torch.arange(1, s.seq_len + 1)[None],
    }
    batch = {k: v.to(args.device) for k, v in batch.items()}
    del d, w
    loss_config = resolve_loss_config("kl_div", "eager" if args.device == "cpu" else "fused")
    opt = torch.optim.AdamW(model.named_parameters(), lr=args.lr, weight_decay=0.01)

    def step():
        amp = torch.autocast(args.device, dtype=dtype) if args.dtype == "bf16" else contextlib.nullcontext()
        with amp:
            _, loss, metrics = model(
                **batch, ttt_steps=s.ttt, ttt_step_loss_decay=args.decay, loss_config=loss_config)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item(), [metrics[f"loss_{k}_sum"].item() / args.decay ** k for k in range(s.ttt)]

    workload.measure(
        args, "speculators", step, train_lm_head=False, teacher_vocab=s.draft_vocab,
        extra={
            "variant": args.attn, "version": "0.9.0" if not hasattr(speculators, "__version__") else speculators.__version__,
            "torch": torch.__version__, "transformers": transformers.__version__,
            "trainable_m": round(sum(x.numel() for x in model.parameters() if x.requires_grad) / 1e6, 2),
        })


if __name__ == "__main__":
    main()
