"""The drafter in speculators format, written by speculators' own classes: what vLLM serves.

Three things differ from SGLang's files: ids are capture points at the top level (layer output + 1), the decoder layer
is called `layers.0`, and `norm_before_residual` must be written as False, since vLLM takes True where it is absent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.export.drafter_files import MIDLAYER, cast
from pipeline.files import clear_disk_errors, make_dir, read_json, write_json
from pipeline.layers.layer_ids import EngineIds
from pipeline.train.drafter_config import DrafterConfig

_SPECULATORS_LAYER = "layers.0."


def write_vllm(folder: Path, drafter: DrafterConfig, weights: dict[str, Any], model: Any, *, dtype: str) -> None:
    """config.json and model.safetensors through `Eagle3DraftModel.save_pretrained`.

    Args:
        weights: as for `export.write_sglang`; a full draft vocabulary has no map in this format.
        model: of `build_speculator`.
    """
    state = {name.replace(MIDLAYER, _SPECULATORS_LAYER): t for name, t in cast(weights, dtype).items()}
    if drafter.draft_vocab_size == drafter.vocab_size:
        state = {name: t for name, t in state.items() if name not in ("d2t", "t2d")}
    wanted = set(model.state_dict()) - {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if wanted != set(state):
        raise RuntimeError(f"speculators' drafter has other weights than ours: {sorted(wanted ^ set(state))}")
    building = make_dir(folder.with_name(f"building-{folder.name}"))
    try:
        with _quiet(), clear_disk_errors(folder):
            model.save_pretrained(building, state_dict=state, max_shard_size="1TB")
        _only_data(building)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def build_speculator(
    drafter: DrafterConfig,
    ids: EngineIds,
    *,
    dtype: str,
    context: int,
    target_text: Any,
    verifier: str,
    architecture: str,
    draft_steps: int,
) -> Any:
    """Speculators' own model of this drafter, on the meta device: its vocabulary-sized tensors are not needed here.

    Args:
        verifier: hub id or folder of the target; speculators and vLLM read its config from there.
        architecture: the target's class name.
        draft_steps: tokens of a chain, what vLLM drafts where the launch line says nothing.
    """
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=drafter.vocab_size,
        hidden_size=drafter.hidden_size,
        intermediate_size=drafter.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=drafter.num_attention_heads,
        num_key_value_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        rms_norm_eps=drafter.rms_norm_eps,
        max_position_embeddings=max(drafter.max_position_embeddings, context),
        rope_parameters=dict(drafter.rope_parameters),
        tie_word_embeddings=False,
        bos_token_id=getattr(target_text, "bos_token_id", None),
        eos_token_id=getattr(target_text, "eos_token_id", None),
        num_aux_hidden_states=drafter.num_fc_inputs,
    )  # vLLM's drafter reads it here and takes 3 otherwise
    layer._attn_implementation = "eager"  # the default, flex attention, has no CPU path; it is not saved
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=drafter.draft_vocab_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(ids.ids),
        num_aux_hidden_states=drafter.num_fc_inputs,
        norm_before_fc=drafter.norm_before_fc,
        fc_norm=drafter.fc_norm,
        norm_output=drafter.norm_output,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_steps)],
            verifier=VerifierConfig(name_or_path=verifier, architectures=[architecture]),
        ),
    )
    with torch.device("meta"):
        return Eagle3DraftModel(config).to(getattr(torch, dtype))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar, which is longer than the work."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _only_data(folder: Path) -> None:
    """speculators adds its config class as Python code for the hub; an export is data only."""
    config = read_json(folder / "config.json", fix="make export")
    config.pop("auto_map", None)
    write_json(folder / "config.json", config)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
