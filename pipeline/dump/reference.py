"""The reference for hidden states: transformers, observed by hooks, one sample at a time.

Layer output l is what decoder layer l returns, the final hidden what the final norm returns. `output_hidden_states` is
not used: its last entry is the state after the norm, so layer output N-1 is not among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import PipelineError
from pipeline.store import FINAL_HIDDEN, layer_output


class Reference:
    """A target loaded with transformers.

    Args:
        path: folder of the checkpoint.
        dtype: computes and returns in it.
        device: "cpu" or "cuda".
    """

    def __init__(self, path: Path, *, dtype: torch.dtype, device: str = "cpu", trust_remote_code: bool = False):
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as e:
            raise PipelineError(f"transformers cannot load the target: {str(e).splitlines()[0]}", field="target.path",
                                value=str(path), fix='make dump ARGS="dump.engine=sglang"') from e
        self.model_class = type(model).__name__
        self.device = device
        self.decoder: Any = model.get_decoder().to(device).eval()
        self.layers, self.norm = self.decoder.layers, self.decoder.norm

    @torch.inference_mode()
    def states(self, input_ids: Sequence[int], layers: Iterable[int]) -> dict[str, torch.Tensor]:
        """Of one sample: `layer_output.<l>` for every l of `layers` and `final_hidden`, each [T, H], on the CPU."""
        with self._observed(layers) as seen:
            self.decoder(input_ids=torch.tensor([list(input_ids)], device=self.device), use_cache=False)
        return seen

    @contextlib.contextmanager
    def _observed(self, layers: Iterable[int]) -> Iterator[dict[str, torch.Tensor]]:
        seen: dict[str, torch.Tensor] = {}

        def keep(name: str):
            def hook(module: Any, inputs: tuple, output: Any) -> None:
                seen[name] = (output[0] if isinstance(output, tuple) else output)[0].cpu().clone()

            return hook

        modules = {layer_output(layer): self.layers[layer] for layer in layers} | {FINAL_HIDDEN: self.norm}
        handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()
