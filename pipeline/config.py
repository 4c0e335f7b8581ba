"""Typed configuration: every key, its unit and its bounds. Unknown keys are errors.

The stages hand the dictionary that Hydra resolved to `load_config`; nothing in the pipeline imports Hydra.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from pipeline.errors import PipelineError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    root: str
    """folder that holds the runs"""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """folder of this run below root"""


class SlotsConfig(Section):
    layers: list[StrictInt] | None
    """layer outputs for fc.0, fc.1, …, ascending; null: what the run's manifest says, else the target's default"""


class TargetDrafterConfig(Section):
    """Shape of the drafter's one decoder layer for this target."""

    num_attention_heads: int | None = Field(gt=0)
    num_key_value_heads: int | None = Field(gt=0)
    head_dim: int | None = Field(gt=0)
    intermediate_size: int | None = Field(gt=0)


class TargetConfig(Section):
    """The target. Facts are checked against its checkpoint; a null one is read from there."""

    name: str
    path: str
    """hub id, folder, or `embedded:smollm2-135m-instruct`"""
    revision: str | None
    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    quantization: str | None
    """passed to the engine for the dump, the responses and the serve check: dump on the basis that is served"""
    trust_remote_code: bool
    architecture: str | None
    num_layers: int | None = Field(gt=0)
    hidden_size: int | None = Field(gt=0)
    vocab_size: int | None = Field(gt=0)
    max_position_embeddings: int | None = Field(gt=0)
    slots_layers: list[int] | None
    """default layer outputs of this target; null: [1, N//2-1, N-4]"""
    drafter: TargetDrafterConfig
    tp_size: int = Field(gt=0)
    """tensor parallel size of the engine"""
    context_length: int = Field(gt=0)
    """tokens; longer samples are skipped and counted"""


class PromptsConfig(Section):
    source: str = Field(min_length=1)
    """`builtin`, a .jsonl/.json/.parquet file, or the name or path of a Hugging Face dataset"""
    source_split: str
    """split of a Hugging Face dataset"""
    limit: int | None = Field(gt=0)
    """use this many conversations, spread evenly over the source's categories where it has them"""
    heldout_fraction: float = Field(ge=0, lt=1)
    """share kept for validation where the source does not say which are held out"""
    respond: Literal["keep", "target"]
    """keep the answers of the source, or let the target write the last one"""
    respond_engine: Literal["transformers", "sglang"]
    respond_dtype: Literal["target", "fp32", "bf16", "fp16"]
    max_new_tokens: int = Field(ge=2)
    """of an answer; in one of a single token nothing can be drafted"""
    temperature: float = Field(ge=0)
    """0: greedy"""
    top_p: float = Field(gt=0, le=1)
    batch_size: int = Field(gt=0)
    """conversations answered at once by transformers"""
    system_prompt: str | None
    """put in front of conversations that have none"""


class DumpConfig(Section):
    engine: Literal["sglang", "transformers"]
    layers: list[StrictInt] | None
    """more layer outputs to dump than slots.layers, so that slots can be re-bound without dumping again"""
    dtype: Literal["target", "fp32", "bf16", "fp16"]
    """compute and storage type"""
    shard_tokens: int = Field(gt=0)
    """rows per shard"""
    chunked_prefill_size: int = Field(gt=0)
    """tokens per prefill chunk of the engine"""
    max_running_requests: int = Field(gt=0)
    probe_samples: int = Field(ge=0)
    """held-out samples whose every layer output is kept for later proofs"""
    disk_reserve_gib: float = Field(ge=0)
    """free space to leave on the disk"""
    mem_fraction_static: float | None = Field(gt=0, lt=1)
    allow_untested_engine: bool
    """run with an SGLang version that this pipeline was not tested with"""


class DrafterSection(Section):
    """Shape of the drafter. Nulls are taken from the target when it is opened."""

    draft_vocab_size: int = Field(gt=0)
    num_attention_heads: int | None = Field(gt=0)
    num_key_value_heads: int | None = Field(gt=0)
    head_dim: int | None = Field(gt=0)
    intermediate_size: int | None = Field(gt=0)
    lm_head_init: Literal["target", "random"]
    max_position_embeddings: int | None = Field(gt=0)
    """null: the target's"""
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool

    @model_validator(mode="after")
    def _heads(self) -> DrafterSection:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads and kv_heads and heads % kv_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class TrainConfig(Section):
    ttt_steps: int = Field(ge=1)
    loss_decay: float = Field(gt=0, le=1)
    """weight of TTT step j is loss_decay**j"""
    epochs: int = Field(gt=0)
    batch_tokens: int = Field(gt=0)
    """tokens per batch and process; samples are packed up to it"""
    gradient_accumulation: int = Field(gt=0)
    lr: float = Field(gt=0)
    warmup_ratio: float = Field(ge=0, lt=1)
    min_lr_ratio: float = Field(ge=0, le=1)
    weight_decay: float = Field(ge=0)
    betas: tuple[float, float]
    max_grad_norm: float = Field(gt=0)
    precision: Literal["auto", "fp32", "bf16"]
    """bf16: autocast with fp32 master weights; auto: bf16 on a GPU or a CPU with AMX, else fp32, which is faster there"""
    checkpoint_every: int = Field(gt=0)
    """optimizer steps"""
    keep_checkpoints: int = Field(gt=0)
    log_every: int = Field(gt=0)
    """optimizer steps"""
    validate_every_epochs: int = Field(gt=0)


class ExportConfig(Section):
    engines: list[Literal["sglang", "vllm"]] = Field(min_length=1)
    dtype: Literal["auto", "fp32", "bf16"]
    """of the exported weights; auto: fp32 where the target is served on a CPU, else bf16"""
    served_context: int | None = Field(gt=0)
    """longest context the drafter must serve; null: the target's max_position_embeddings"""
    draft_steps: int = Field(gt=0)
    topk: int = Field(gt=0)
    """branches per step in SGLang; 1: a chain, which is all that vLLM drafts"""
    draft_tokens: int | None = Field(gt=0)
    """tokens SGLang verifies per target forward (num_draft_tokens); null: draft_steps + 1, all that a chain can have"""

    @model_validator(mode="after")
    def _tree(self) -> ExportConfig:
        if self.topk > 1 and self.draft_tokens is None:
            raise ValueError("a draft tree (topk > 1) needs draft_tokens, the number of nodes to verify")
        if self.topk == 1 and self.draft_tokens not in (None, self.draft_steps + 1):
            raise ValueError("a chain (topk 1) verifies draft_steps + 1 tokens: leave draft_tokens null")
        return self


class VerifyConfig(Section):
    checks: list[Literal["replay", "serve"]] = Field(min_length=1)
    replay_samples: int | None = Field(gt=0)
    """held-out samples replayed; null: all. Of fewer than all, accuracies are compared within their sampling error"""
    serve_prompts: int = Field(gt=0)
    serve_tokens: int = Field(gt=0)
    draft_steps: int = Field(gt=0)
    max_tau_gap: float = Field(gt=0)
    """largest relative difference between the engine's τ and the replayed τ"""


class TrackingConfig(Section):
    mode: Literal["none", "offline", "online"]
    project: str
    entity: str | None


class Config(Section):
    run: RunConfig
    force: bool
    """redo a stage even if it is up to date"""
    check_inputs: Literal["fast", "full"]
    """fast: size and mtime, then checksum on a difference; full: always checksum"""
    seed: int = Field(ge=0)
    device: Literal["auto", "cpu", "cuda"]
    threads: int | None = Field(gt=0)
    """CPU threads per process; null: torch's default"""
    gpus: int = Field(gt=0)
    """GPUs given to this stage by `make <stage> GPUS=n`"""
    slots: SlotsConfig
    target: TargetConfig
    prompts: PromptsConfig
    dump: DumpConfig
    drafter: DrafterSection
    train: TrainConfig
    export: ExportConfig
    verify: VerifyConfig
    tracking: TrackingConfig


def load_config(resolved: dict) -> Config:
    """Check a resolved configuration.

    Raises:
        PipelineError: an unknown key or a value out of bounds, named with its full path.
    """
    try:
        return Config.model_validate(resolved)
    except ValidationError as e:
        lines = [".".join(str(p) for p in err["loc"]) + f" = {err.get('input')!r}: {err['msg']}" for err in e.errors()]
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise PipelineError("the configuration is not valid:\n    " + "\n    ".join(lines), field=where,
                            value=first.get("input"), fix="make show-config STAGE=<stage> shows every key") from e


def section(config: Config, *names: str) -> dict:
    """The named sections (or top-level keys) as plain JSON values: what a stage's result depends on."""
    dumped = config.model_dump(mode="json")
    return {name: dumped[name] for name in names}
