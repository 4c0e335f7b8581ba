"""Prompts that begin alike are read once: the texts stay those of transformers' own greedy generate."""

from __future__ import annotations

import pytest
import torch

from pipeline.prompts.decode import Response, generate_batch, use_grouped_attention

EOS = [2, 3]
VOCAB = 32


def generated_by_transformers(model, prompt: list[int], new: int) -> Response:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                         eos_token_id=EOS, pad_token_id=EOS[0])[0, len(prompt):].tolist()
    return Response(out, "stop" if out[-1] in EOS else "length")


def shapes() -> dict:
    return dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.5, eos_token_id=EOS,
                pad_token_id=EOS[0])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    begin, *rest = (torch.randint(4, VOCAB, (n,), generator=random).tolist() for n in (7, 3, 9, 1, 4, 17, 6))
    return [begin + r for r in rest]


def calls(model, prompts: list[list[int]], new: int) -> tuple[list[Response], list[tuple[int, ...]]]:
    """The answers, and the shape of the ids of every forward."""
    seen = []
    hook = model.register_forward_pre_hook(lambda _m, _a, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    try:
        return generate_batch(model, prompts, max_new_tokens=new, eos_token_ids=EOS), seen
    finally:
        hook.remove()


@pytest.mark.parametrize("grouped", [False, True])
def test_what_all_prompts_begin_with_is_read_once_and_changes_no_text(prompts, grouped):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shapes())).float().eval()
    if grouped:
        use_grouped_attention(model)
    found, seen = calls(model, prompts, 10)
    model.set_attn_implementation("sdpa")
    assert found == [generated_by_transformers(model, p, 10) for p in prompts]
    assert seen[:2] == [(1, 7), (len(prompts), 17)]  # the shared tokens alone, then the rest of each
    assert len({len(r.ids) for r in found}) > 2


def test_nothing_is_shared_where_a_window_slides(prompts):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**shapes(), sliding_window=6)).float().eval()
    found, seen = calls(model, prompts, 8)
    assert found == [generated_by_transformers(model, p, 8) for p in prompts]
    assert seen[0] == (len(prompts), 24)


def test_prompts_that_are_the_same_or_begin_the_whole_of_another(prompts):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shapes())).float().eval()
    alike = [prompts[0], prompts[0], prompts[0] + [5, 6], prompts[0][:4]]
    assert generate_batch(model, alike, max_new_tokens=6, eos_token_ids=EOS) == \
        [generated_by_transformers(model, p, 6) for p in alike]
