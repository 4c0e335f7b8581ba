"""Typed configuration: every key, its unit and its bounds. Unknown keys are errors.

The stages hand the dictionary that Hydra resolved to `load_config`; nothing in the pipeline imports Hydra.
"""

from __future__ import annotations

from typing import Annotated, Literal

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
    layer_id_rule: Literal["layer_output", "capture_point"] | None
    """what a layer id is to SGLang's class, for a class that cannot be asked; null: ask it, refuse if it cannot be asked"""
    drafter: TargetDrafterConfig
    tp_size: int = Field(gt=0)
    """tensor parallel size of the engine"""
    context_length: int = Field(gt=0)
    """tokens; what becomes of longer conversations says prompts.truncate"""


class SourceConfig(Section):
    """One source of a mixture."""

    path: str = Field(min_length=1)
    """`builtin`, a file, a folder of files, or the name of a Hugging Face dataset"""
    format: Literal["auto", "pretokenised", "openai", "sharegpt", "ultrachat", "alpaca", "turns", "prompt", "text"] = "auto"
    """auto: what each record's fields say, by the table in pipeline/prompts/formats.py"""
    split: str | None = None
    """of a dataset or folder; null: prompts.source_split"""
    weight: float | None = Field(default=None, gt=0)
    """share of the mixture relative to the other sources; on all of them or on none"""
    cap: int | None = Field(default=None, gt=0)
    """use at most this many of its conversations"""
    take: int | None = Field(default=None, gt=0)
    """read only this many records, from the beginning: for a dataset too long to be read whole"""


class PromptsConfig(Section):
    source: str | list[SourceConfig] = Field(min_length=1)
    """the path of a source as in `SourceConfig`, or a list of sources to mix"""
    source_split: str
    """split of a dataset or folder"""
    on_bad_record: Literal["stop", "skip"]
    """a damaged record or one of unknown form ends the stage, or is counted and kept in quarantine.jsonl"""
    limit: int | None = Field(gt=0)
    """use this many conversations, spread evenly over the source's categories where it has them"""
    min_chars: int | None = Field(gt=0)
    max_chars: int | None = Field(gt=0)
    """characters of a whole conversation, without the turns that the target writes anew"""
    languages: list[str] | None = Field(min_length=1)
    """ISO 639-1 codes; conversations whose user writes in another language are left out. Needs py3langid"""
    near_duplicates: float | None = Field(ge=0.4, le=0.95)
    """of conversations whose 5-word runs are this much the same (Jaccard similarity), one is used; null: not looked for"""
    decontaminate_words: int | None = Field(gt=0)
    """training conversations that share a run of so many words with a held-out or benchmark prompt are left out; null: none"""
    decontaminate_against: list[str]
    """benchmark prompts: files or folders in any format"""
    heldout_fraction: float = Field(ge=0, lt=1)
    """share kept for validation where the source does not say which are held out"""
    respond: Literal["keep", "target"]
    """keep the answers of the source, or let the target write them"""
    answer: Literal["all", "last"]
    """what the target writes: every turn of the assistant, seeing its own earlier ones, or the last one after the source's"""
    respond_engine: Literal["transformers", "sglang", "server"] | None
    """null: sglang on a GPU, else transformers; server: OpenAI-compatible servers (SGLang, vLLM …) that serve the target"""
    respond_dtype: Literal["auto", "target", "fp32", "bf16", "fp16"]
    """of transformers and sglang; auto: bf16 for transformers on a CPU that computes faster in it, else the target's"""
    base_url: str | list[str] | None
    """of the server, or of several that serve the same, as in http://127.0.0.1:30000/v1"""
    server_model: str | None
    """the target's name at the servers; null: the only one that each serves"""
    api_key_env: str | None
    """name of the environment variable that holds the servers' key (the key itself is written nowhere)"""
    concurrency: int = Field(gt=0)
    """requests in flight, at each server or in SGLang in this process; more than the engine runs at once keep it busy"""
    request_timeout: float = Field(gt=0)
    """seconds that a server may take for an answer, its waiting included"""
    retries: int = Field(ge=0)
    """of a request after 408, 429, 5xx, a time-out or a broken connection; the waits double from half a second to a minute.
    429 and 503 count only while no other request is answered"""
    max_new_tokens: int = Field(ge=2)
    """of an answer; in one of a single token nothing can be drafted"""
    temperature: float = Field(ge=0)
    """0: greedy"""
    top_p: float = Field(gt=0, le=1)
    batch_size: int = Field(gt=0)
    """conversations answered at once by transformers"""
    system_prompt: str | None
    """put in front of conversations that have none"""
    reasoning: Literal["keep", "drop", "mask"]
    """an assistant's reasoning (`reasoning_content`, or inline between <think> and </think>): keep: train it where the
    template writes it | drop: take it out of the messages | mask: leave it in the text, do not train it"""
    train_on: Literal["all", "last"]
    """assistant turns of a conversation whose tokens are trained"""
    max_length: int | None = Field(gt=1)
    """most tokens of a sample; null: target.context_length"""
    truncate: Literal["skip", "turns", "cut", "split"]
    """what becomes of a longer conversation: skip: left out | turns: as many whole turns from the beginning as fit | cut:
    tokens cut off on the right | split: several samples of whole exchanges, each behind the system message, `<id>#<k>`.
    A sample without trained tokens is never made. Rows of token ids are cut or left out; prompts to be answered left out"""
    workers: int | None = Field(gt=0)
    """processes that encode conversations with the source's answers; null: one per core where there is enough to do; 1: none
    beside the stage itself. The samples do not depend on it"""
    shard: str | None = Field(pattern=r"^[0-9]{1,6}/[0-9]{1,6}$")
    """encode or answer this part alone, of a number of machines: 0/2 and 1/2. `make merge` joins the runs"""

    @model_validator(mode="after")
    def _whole(self) -> PromptsConfig:
        if self.shard is not None and int(self.shard.split("/")[0]) >= int(self.shard.split("/")[1]):
            raise ValueError(f"there is no shard {self.shard}: of two they are 0/2 and 1/2")
        if self.respond_engine == "server" and not self.base_url:
            raise ValueError("respond_engine=server needs base_url")
        if isinstance(self.source, list) and len({source.weight is None for source in self.source}) > 1:
            raise ValueError("either every source of a mixture has a weight, or none has")
        return self


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
    init: Literal["regression", "identity"]
    """the first weights where train.init_from gives none: of train/regression.py | of train/start.py"""
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
        if (self.init, self.lm_head_init) == ("regression", "random"):
            raise ValueError("a random lm_head reads no state of the target: init=identity goes with lm_head_init=random")
        return self


class TrainConfig(Section):
    ttt_steps: int = Field(ge=1)
    loss_decay: float = Field(gt=0, le=1)
    """weight of TTT step j is loss_decay**j"""
    loss: Literal["ce", "kl", "tv", "lk", "lk_hybrid"]
    """of one row, as `loss.Objective` defines it. ce: soft cross entropy | kl: forward KL, mixed with the hard label | tv:
    1 - α | lk: -log α | lk_hybrid: KL turning into 1 - α as α grows; α is the share of drafts that sampling accepts"""
    hard_label_weight: float = Field(ge=0, le=1)
    """of kl: share of the hard label, the target's argmax; 0: KL alone"""
    lk_eta: float = Field(ge=0)
    """of lk_hybrid: the weight of KL is exp(-lk_eta · α)"""
    epochs: int = Field(gt=0)
    batch_tokens: int = Field(gt=0)
    """tokens per batch and process; samples are packed up to it"""
    gradient_accumulation: int = Field(gt=0)
    init_from: str | None
    """folder of a drafter to start from: a run's train/, an export, or anybody's of this shape; null: see drafter.init"""
    optimizer: Literal["adamw", "adamw8bit"]
    """adamw: torch's, fused | adamw8bit: moments in 8 bits, needs bitsandbytes"""
    lr: float = Field(gt=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"]
    """after the warm-up; wsd: constant, then linear over the last decay_ratio of the steps"""
    warmup_ratio: float = Field(ge=0, lt=1)
    min_lr_ratio: float = Field(ge=0, le=1)
    """where cosine, linear and wsd end, as a share of lr"""
    decay_ratio: float = Field(gt=0, le=1)
    """of wsd"""
    weight_decay: float = Field(ge=0)
    dropout: float = Field(ge=0, lt=1)
    """share of fc's input, of the embeddings and of what attention and MLP add that is set to 0 in training; with it the
    result depends on how samples are batched and on the number of processes"""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    max_grad_norm: float = Field(gt=0)
    ema: float | None = Field(gt=0, lt=1)
    """decay of a moving average of the weights, which is then validated and exported; null: the weights themselves"""
    parallel: Literal["ddp", "fsdp"]
    """of several processes: ddp: each holds the drafter | fsdp: each holds a part of every tensor and of its moments"""
    precision: Literal["auto", "fp32", "bf16"]
    """bf16: autocast with fp32 master weights; auto: bf16 on a GPU or a CPU with instructions
    for it (AMX, AVX512_BF16), else fp32, which is faster there"""
    checkpoint_every: int = Field(gt=0)
    """optimizer steps"""
    keep_checkpoints: int = Field(gt=0)
    log_every: int = Field(gt=0)
    """optimizer steps"""
    spike_factor: float | None = Field(gt=0)
    """batches whose loss lies so many deviations above the median of the last 64 are logged with samples; null: none"""
    validate_every_epochs: int = Field(gt=0)
    early_stop: int | None = Field(gt=0)
    """stop after so many validations in a row without a better τ_row; null: never"""

    @model_validator(mode="after")
    def _combinations(self) -> TrainConfig:
        if self.hard_label_weight and self.loss != "kl":
            raise ValueError(f"hard_label_weight is of loss=kl, loss={self.loss} would ignore it")
        if self.optimizer == "adamw8bit" and self.parallel == "fsdp":
            raise ValueError("optimizer=adamw8bit cannot work on shards: parallel=ddp, or optimizer=adamw")
        return self


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
    checks: list[Literal["files", "replay", "wiring", "live", "serve", "serve_vllm"]] | None = Field(min_length=1)
    """null: all of them; `serve_vllm` only where vLLM's environment is installed and the run has an export for it"""
    draft: str | None
    """folder of another export in SGLang's form, verified against this run; null: the run's own"""
    replay_samples: int | None = Field(gt=0)
    """held-out samples replayed; null: all. Of fewer than all, accuracies are compared within their sampling error"""
    serve_prompts: int = Field(gt=0)
    serve_tokens: int = Field(gt=0)
    live_prompts: int = Field(gt=0)
    """probe samples of the dump whose prompts are served while the drafter is observed"""
    live_tokens: int = Field(ge=4)
    """generated after each"""
    draft_steps: int = Field(gt=0)
    max_tau_gap: float = Field(gt=0)
    """largest relative difference between the engine's τ and the replayed τ"""


class DiagnoseConfig(Section):
    """`make diagnose`, which is no stage."""

    draft: str | None
    """folder of the drafter whose wiring is wanted"""
    samples: str | None
    """probe text: a run's prompts/samples.parquet (held-out ones first), the same as .jsonl, or a file of plain text;
    null: `prompts.source`, answered by the target"""
    max_samples: int = Field(gt=0)
    """more of them tell neighbouring layers apart more surely"""
    max_tokens: int = Field(ge=16)
    """of a sample; N + 1 states of each token are kept"""
    engine: Literal["auto", "sglang", "transformers"]
    """what runs the target; auto: transformers for targets below 2 GB, else SGLang"""


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
    seed: int = Field(ge=0, lt=2**32)
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
    diagnose: DiagnoseConfig
    tracking: TrackingConfig

    @model_validator(mode="after")
    def _lengths(self) -> Config:
        if (self.prompts.max_length or 0) > self.target.context_length:
            raise ValueError("prompts.max_length is more than target.context_length, which the engine is started with")
        return self


def load_config(resolved: dict) -> Config:
    """Check a resolved configuration.

    Raises:
        PipelineError: an unknown key or a value out of bounds, named with its full path.
    """
    try:
        return Config.model_validate(resolved)
    except ValidationError as e:
        # Rules about several keys of a section come with the whole section as input, which says nothing.
        found = [(".".join(str(p) for p in err["loc"]), None if isinstance(err["input"], dict) else err["input"],
                  err["msg"]) for err in e.errors()]
        lines = [where + (f": {why}" if value is None else f" = {value!r}: {why}") for where, value, why in found]
        where, value, _ = found[0]
        raise PipelineError("the configuration is not valid:\n    " + "\n    ".join(lines), field=where, value=value,
                            fix="make show-config STAGE=<stage> shows every key") from e


def section(config: Config, *names: str) -> dict:
    """The named sections (or top-level keys) as plain JSON values: what a stage's result depends on."""
    dumped = config.model_dump(mode="json")
    return {name: dumped[name] for name in names}
