"""Small chat templates of the shapes of real families, and small tokenizers for them.

Each is written for these tests after the shape of a family's: what a turn is wrapped in, what becomes of system messages,
of reasoning and of tool calls. GEN and END are generation tags in one variant and nothing in the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<think>", "</think>", "<tool_call>", "</tool_call>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<bos>", "<start_of_turn>",
           "<end_of_turn>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|calls|>", "<|/calls|>",
           "<|call|>", "<|args|>", "<|/call|>", "<|User|>", "<|Assistant|>", "<|end|>", "<|output|>", "<|/output|>"]
WORDS = ["system", "user", "assistant", "model", "Hi", "ok", "hm", "Be", "kind"]


@dataclass(frozen=True)
class Family:
    """A template with GEN and END, the token that ends a turn, and what it takes."""

    template: str
    eos: str
    system: bool = True
    tools: bool = False
    reasoning: bool = False


CHATML = Family(
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}GEN{{ m.content + '<|im_end|>' }}END"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "<|im_end|>")

LLAMA3 = Family(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}GEN{{ '{\"name\": \"' + m.tool_calls[0].function.name + '\", \"parameters\": ' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}END"
    "{% elif m.role == 'assistant' %}GEN{{ m.content | trim + '<|eot_id|>' }}END"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "<|eot_id|>", tools=True)

# The think block stands in the turns after the last user turn only; earlier ones lose theirs (SpecForge 296, 544, 564).
QWEN3 = Family(
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(query=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if m.reasoning_content %}{% set thought = m.reasoning_content.strip('\n') %}"
    "{% else %}{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}{% endif %}"
    "{% set said = parts[-1].lstrip('\n') %}GEN{% if loop.index0 > ns.query %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}{{ ('\n' if said or not loop.first else '') + '<tool_call>\n' }}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}END"
    "{% else %}{{ m.content }}{% endif %}{% endif %}{% if m.role != 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "<|im_end|>", tools=True, reasoning=True)

# Markers around calls, reasoning inline in content and dropped from it, no newline anywhere.
DEEPSEEK = Family(
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}"
    "{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|Assistant|>' }}{% endif %}"
    "GEN{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}{{ '<|calls|>' }}"
    "{% for c in m.tool_calls %}{{ '<|call|>' + c.function.name + '<|args|>' + c.function.arguments | tojson + '<|/call|>' }}"
    "{% endfor %}{{ '<|/calls|>' }}{% endif %}{{ '<|end|>' }}END{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|Assistant|>' }}{% endif %}",
    "<|end|>", tools=True)

# Every turn has its own marker and a middle token; a call's id stands in it, the whole of the tools before everything.
KIMI = Family(
    "{% if tools %}{{ '<|im_system|>tools<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}GEN{{ m.content }}"
    "{% if m.tool_calls %}{{ '<|calls|>' }}{% for c in m.tool_calls %}"
    "{{ '<|call|>' + c.id + '<|args|>' + c.function.arguments | tojson + '<|/call|>' }}"
    "{% endfor %}{{ '<|/calls|>' }}{% endif %}{{ '<|im_end|>' }}END"
    "{% else %}{{ '<|im_user|>' if m.role == 'user' else '<|im_system|>' }}{{ m.role + '<|im_middle|>' }}"
    "{{ '## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' else '' }}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
    "<|im_end|>", tools=True)

GEMMA = Family(
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.role == 'assistant' %}GEN{{ m.content | trim + '<end_of_turn>' }}END"
    "{% else %}{{ m.content | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}", "<end_of_turn>", system=False)

# No generation prompt; the tools stand before the last user turn only; what is said beside a call is left out.
MISTRAL = Family(
    "{{ '<s>' }}{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('roles must alternate') }}"
    "{% elif m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}GEN{{ '[TOOL_CALLS]' + m.tool_calls | map(attribute='function') | list | tojson + '</s>' }}END"
    "{% else %}GEN{{ ' ' + m.content + '</s>' }}END{% endif %}{% endfor %}", "</s>", system=False, tools=True)

FAMILIES = {"chatml": CHATML, "llama-3": LLAMA3, "qwen-3": QWEN3, "deepseek": DEEPSEEK, "kimi": KIMI, "gemma": GEMMA,
            "mistral": MISTRAL}


def plain(family: Family) -> str:
    return family.template.replace("GEN", "").replace("END", "")


def tagged(family: Family) -> str:
    return family.template.replace("GEN", "{% generation %}").replace("END", "{% endgeneration %}")


@lru_cache
def make_tokenizer(template: str, eos: str, *, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that has one token per byte, per word of WORDS and per special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(merges)
    for word in WORDS:
        pairs += [(word[:i], word[i]) for i in range(1, len(word)) if (word[:i], word[i]) not in pairs]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, chat_template=template)


class SlowTokenizer:
    """A tokenizer without offsets, as Kimi's tiktoken one (SpecForge PR 108)."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast):
        self._fast = fast

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict:
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}

    def __getattr__(self, name: str):
        return getattr(self._fast, name)


def marked(tokenizer, ids: list[int], mask: list[int]) -> str:
    """The text with « and » around each run of trained tokens."""
    out, inside = "", False
    for i in range(len(ids) + 1):
        trained = i < len(ids) and bool(mask[i])
        if trained != inside:
            out, inside = out + ("«" if trained else "»"), trained
        if i < len(ids):
            out += tokenizer.decode([ids[i]], skip_special_tokens=False)
    return out
