"""Prompts are what SGLang's own chat endpoint makes of the same messages: its serving class inside a real engine."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline.engines.engine import engine, prepare_environment
from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.formats import parse
from pipeline.target import EMBEDDED, load_tokenizer, local_folder
from tests.chat_templates import CHATML, FAMILIES, Family, make_tokenizer, plain
from tests.test_chat import TOOLS, turns
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine is for machines without a GPU")]

# A client's request: text parts, arguments as JSON in a string, a call's fields in another order, fields to be left out.
CALLS = [{"function": {"arguments": '{"x": "é", "y": [1, 2.5]}', "name": "f"}, "id": "f:0", "type": "function"}]
AGENT = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " ok\n"}], "name": "kind"},
         {"role": "assistant", "content": None, "tool_calls": CALLS},
         {"role": "tool", "content": [{"type": "text", "text": "7"}, {"type": "text", "text": "8"}], "tool_call_id": "f:0"},
         {"role": "assistant", "content": " ok ", "reasoning_content": "\nhm hm\n"},
         {"role": "user", "content": "\n\nhm 🙂"},
         {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi"}]
BARE_TOOL = [{"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "f"}}]
ODD_TOOLS = [{"function": {"strict": True, "name": "f", "returns": "x"}, "type": "function", "cache": 1}, *TOOLS,
             {"type": "function", "defer_loading": True, "function": {"name": "g", "strict": None, "description": "é"}}]
# Prints whatever the engine hands over of a call, a schema and a message.
WHOLE = Family("{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.items() | list | tojson }}<|im_end|>{% endfor %}"
               "{% if add_generation_prompt %}<|im_start|>{% endif %}", "<|im_end|>", tools=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    prepare_environment("cpu", threads=1)
    folder = tiny_llama(tmp_path_factory.mktemp("target"), layers=2)
    make_tokenizer(plain(CHATML), CHATML.eos).save_pretrained(folder)
    with engine(folder, device="cpu", dtype="float32", max_total_tokens=2048) as llm:
        yield llm


def engine_ids(llm, tokenizer, messages: list[dict], tools: list[dict] | None) -> list[int]:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.template_manager import TemplateManager

    llm.tokenizer_manager.tokenizer = tokenizer
    templates = TemplateManager()
    templates.initialize_templates(llm.tokenizer_manager, llm.tokenizer_manager.model_path)
    serving = OpenAIServingChat(llm.tokenizer_manager, templates)
    request = ChatCompletionRequest(model="tiny", messages=messages, tools=tools)
    return serving._process_messages(request, is_multimodal=False).prompt_ids


def prompts(messages: list[dict]) -> list[int]:
    """Number of messages before each assistant turn."""
    return [k for k, message in enumerate(messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("tools", [None, BARE_TOOL, ODD_TOOLS])
@pytest.mark.parametrize("name", [*FAMILIES, "whole"])
def test_prompts_of_every_turn_are_the_engines(llm, name: str, tools: list[dict] | None):
    family = FAMILIES.get(name, WHOLE)
    tokenizer = make_tokenizer(plain(family), family.eos)
    asked = [m for m in AGENT if family.tools or m["role"] != "tool" and not m.get("tool_calls")]
    if family.system:
        asked = [{"role": "system", "content": "Be kind"}, *asked]
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], train_on="last")
    ours = parse(json.loads(json.dumps({"messages": asked, "tools": tools})))
    for k in prompts(asked):
        prompt = engine_ids(llm, tokenizer, asked[:k], tools)
        assert chat.prompt_ids(ours.messages[:k], ours.tools) == prompt
        if name != "whole":  # what is trained begins behind the engine's prompt
            found = chat.encode(ours.messages[:k + 1], ours.tools)
            assert found.input_ids[:len(prompt)] == prompt
            assert found.loss_mask.index(1) == len(prompt)


def test_prompts_of_the_embedded_target_are_the_engines(llm):
    tokenizer = load_tokenizer(local_folder(EMBEDDED), False)
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id])
    messages = turns("Why  do cats\n\npurr?", "  They’re   content.\n", "\nIn 3.14159 words, naïvely: 🙂", "Ok", "x" * 300, "y")
    for conversation in (messages, [{"role": "system", "content": "Be brief. "}, *messages]):
        for k in prompts(conversation):
            assert chat.prompt_ids(conversation[:k]) == engine_ids(llm, tokenizer, conversation[:k], None)


def test_what_the_engine_goes_on_with_is_what_is_trained(llm):
    # The engine continues its own prompt; the sample of prompt and answer has exactly the answer's tokens trained.
    tokenizer = make_tokenizer(plain(CHATML), CHATML.eos)
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id])
    messages = turns("Hi", "ok", "hm")
    prompt = engine_ids(llm, tokenizer, messages, None)
    answer = llm.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8})["output_ids"]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    found = chat.encode([*messages, {"role": "assistant", "content": text}])
    assert found.input_ids[:len(prompt)] == prompt and found.loss_mask[len(prompt):] == [1] * (
        len(found.input_ids) - len(prompt) - 1) + [0]  # the newline behind the end of the turn
