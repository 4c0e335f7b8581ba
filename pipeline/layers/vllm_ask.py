"""Asks vLLM's model class which layers it captures. Runs with vLLM's own interpreter, which has no other part of this
package: `vllm_ids` starts it as a file, writes the question to its standard input and reads the answer from its output.

Question: {"architecture": name, "num_layers": N, "ids": [[2, 15, 27], ...]}.
Answer:   {"version", "model_class", "rule_source", "answers": [capture points or the error, one for each list],
           "no_ids": capture points}, or {"version", "error", "serves": false if vLLM would refuse the drafter}.

As with SGLang, the object that is asked never ran `__init__`: it has an inner decoder with N empty layers, and the ids
come from a drafter's config through the function that serving reads them with.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from types import SimpleNamespace

_KEY = "eagle_aux_hidden_state_layer_ids"


def answer(question: dict) -> dict:
    import vllm
    from torch import nn
    from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    class Decoder(nn.Module, EagleModelMixin):
        pass

    class LanguageModel(nn.Module, SupportsEagle3):
        pass

    def stub(cls: type) -> tuple[nn.Module, nn.Module]:
        """(an object of `cls`, the decoder in it)"""
        outer, language_model, decoder = object.__new__(cls), object.__new__(LanguageModel), object.__new__(Decoder)
        for module in (outer, language_model, decoder):
            nn.Module.__init__(module)
        decoder.layers = [None] * question["num_layers"]
        language_model.model = decoder
        parts = {"model": decoder}
        if hasattr(cls, "get_language_model"):  # a multimodal class
            parts = {"language_model": language_model, "get_language_model": lambda: language_model}
        for name, value in parts.items():
            if not isinstance(getattr(cls, name, None), property):
                setattr(outer, name, value)
        return outer, decoder

    def ask(ids: list[int]) -> list[int]:
        draft = SimpleNamespace(hf_config=SimpleNamespace(**{_KEY: ids}))
        read = get_eagle3_aux_layers_from_config(SimpleNamespace(draft_model_config=draft))
        model, decoder = stub(cls)
        model.set_aux_hidden_state_layers(read)
        if not decoder.aux_hidden_state_layers:
            raise ValueError("nothing was set")
        return sorted(decoder.aux_hidden_state_layers)

    name = question["architecture"]
    if name not in ModelRegistry.models:
        return {"version": vllm.__version__, "error": f"vLLM {vllm.__version__} offers no model class {name}"}
    try:
        cls = ModelRegistry.models[name].load_model_cls()
    except Exception as e:
        error = f"vLLM {vllm.__version__} cannot import {name} on this machine ({type(e).__name__}: {e})"
        return {"version": vllm.__version__, "error": error}
    if not supports_eagle3(cls):
        error = f"vLLM {vllm.__version__}'s {name} does not support EAGLE-3"
        return {"version": vllm.__version__, "error": error, "serves": False}
    answers = []
    for ids in question["ids"]:
        try:
            answers.append(ask(ids))
        except Exception as e:
            answers.append(f"{type(e).__name__}: {e}")
    try:
        no_ids = list(stub(cls)[0].get_eagle3_default_aux_hidden_state_layers())
    except Exception as e:
        no_ids = f"{type(e).__name__}: {e}"
    method = cls.set_aux_hidden_state_layers
    path = (inspect.getsourcefile(method) or "?").rpartition("/site-packages/")[2]
    return {"version": vllm.__version__, "model_class": cls.__name__, "rule_source": f"{path} {method.__qualname__}",
            "answers": answers, "no_ids": no_ids}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # vLLM prints while it is imported
        found = answer(json.load(sys.stdin))
    print(json.dumps(found))
