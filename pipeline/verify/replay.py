"""Replay: an independent, plain forward over the exported files, and the accept lengths that follow from it.

Nothing of the trainer is used: no `Drafter`, no TTT attention, no packing, no gate of `alignment`. Weights and sizes
come from `export/sglang/`, rope from transformers, attention is written out over dense scores. What the trainer, this
file and the engine agree on is therefore not agreed by sharing code.

Rows as the engine has them: row i holds the target's hidden states at token i, reads the embedding of token i+1, stands
at rope position i and drafts token i+2. Draft step j reads the token before it and attends to the rows 0 … i, whose
keys always come from the target's hidden states (the engine writes them anew after each verification), and to its own
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu, softmax

from pipeline.errors import PipelineError
from pipeline.export.drafter_files import expected_tensors, norm_before_fc, read_config, read_tensors
from pipeline.export.validate_report import Report
from pipeline.export.validate_weights import canonical_names

_SCORES = 1 << 26  # most attention scores held at a time


class ExportedDrafter:
    """The drafter in an exported SGLang folder, computing in fp32.

    Args:
        folder: config.json and model.safetensors.
        embedding: [V, H], the target's.
        device: "cpu" or "cuda"; inputs and outputs of `draft` may lie elsewhere.

    Raises:
        PipelineError: the files cannot be read, or weights are missing or have other shapes than config.json says.
    """

    def __init__(self, folder: Path, embedding: Tensor, device: str = "cpu"):
        self._load(*_read(Path(folder)), embedding, device)

    @classmethod
    def of(cls, config: dict, weights: dict[str, Tensor], embedding: Tensor, device: str = "cpu") -> ExportedDrafter:
        """A drafter in memory: what config.json and model.safetensors of a folder would hold."""
        drafter = cls.__new__(cls)
        drafter._load(config, dict(weights), embedding, device)
        return drafter

    def _load(self, config: dict, weights: dict[str, Tensor], embedding: Tensor, device: str) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config, self.device = config, torch.device(device)
        self.target_id = (weights.pop("d2t") + torch.arange(self.config["draft_vocab_size"])).to(device)
        weights.pop("t2d")
        self.weights = {name: tensor.to(device).float() for name, tensor in weights.items()}
        self.embedding = embedding.to(device)
        keys = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_parameters")
        try:
            self.rotary = LlamaRotaryEmbedding(LlamaConfig(**{key: self.config[key] for key in keys})).to(device)
        except Exception as e:  # transformers has many ways to refuse what a file says
            raise PipelineError(f"transformers builds no rope from the drafter's config: {type(e).__name__}: {e}",
                                field="rope_parameters", value=self.config.get("rope_parameters"), fix="make export") from e

    @torch.inference_mode()
    def draft(self, ids: Tensor, features: Tensor, rows: Tensor, steps: int, *, forced: bool) -> Tensor:
        """Greedy drafts.

        Args:
            ids: [T] the sequence.
            features: [T, n·H] fc's input at every token.
            rows: [N] rows to draft from, each below T-1.
            steps: K.
            forced: step j reads token i+1+j of the sequence (as in training) instead of its own last draft (as served).

        Returns:
            [N, K] drafted target ids on the CPU; entry j of row i is the draft of token i+2+j.
        """
        ids, features, rows = (x.to(self.device) for x in (ids, features, rows))
        fused = self.fuse(features[:-1].float())
        key0, value0 = self._block0(ids, fused)
        parts = [self._draft_rows(part, ids, fused, key0, value0, steps, forced) for part in self._split(rows, ids)]
        return torch.cat(parts).cpu() if parts else torch.empty(0, steps, dtype=torch.long)

    @torch.inference_mode()
    def forced_logits(self, ids: Tensor, fused: Tensor, rows: Tensor, steps: int) -> Tensor:
        """Logits of the steps that read the sequence's own tokens, [N, K, Vd]; all on the drafter's device.

        Args:
            fused: [T-1, H] fc's output, however it was computed. `ids` and `rows` as in `draft`.
        """
        key0, value0 = self._block0(ids, fused)
        parts = []
        for part in self._split(rows, ids):
            logits: list[Tensor] = []

            def read(j: int, found: Tensor, part: Tensor = part, logits: list[Tensor] = logits) -> Tensor:
                logits.append(found)
                return ids[(part + 2 + j).clamp(max=len(ids) - 1)]

            self._unroll(part, ids, fused, key0, value0, steps, read)
            parts.append(torch.stack(logits, 1))
        return torch.cat(parts)

    def _split(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Rows in pieces whose attention scores over the whole sequence fit into `_SCORES`."""
        return rows.split(max(1, _SCORES // (self.config["num_attention_heads"] * len(ids))))

    def _block0(self, ids: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T-1, A, D] of every row that has a next token; `fused` [T-1, H] is fc's output."""
        x = self._layer_input(self.embedding[ids[1:]].float(), fused)
        key, value = self._heads("k", x), self._heads("v", x)
        return self._full(self._rotate(key, torch.arange(len(fused), device=self.device))), self._full(value)

    def _draft_rows(
        self, rows: Tensor, ids: Tensor, fused: Tensor, key0: Tensor, value0: Tensor, steps: int, forced: bool
    ) -> Tensor:
        drafts: list[Tensor] = []

        def read(j: int, logits: Tensor) -> Tensor:
            drafts.append(self.target_id[logits.argmax(-1)])
            return ids[(rows + 2 + j).clamp(max=len(ids) - 1)] if forced else drafts[-1]

        self._unroll(rows, ids, fused, key0, value0, steps, read)
        return torch.stack(drafts, 1)

    def _unroll(
        self,
        rows: Tensor,
        ids: Tensor,
        fused: Tensor,
        key0: Tensor,
        value0: Tensor,
        steps: int,
        read: Callable[[int, Tensor], Tensor],
    ) -> None:
        """All steps of some rows; `read(j, logits [N, Vd])` says which tokens [N] step j+1 reads."""
        visible = torch.arange(len(key0), device=self.device) <= rows[:, None]  # [N, T-1]
        hidden, token = fused[rows], ids[rows + 1]
        own_keys, own_values = [], []
        for j in range(steps):
            x = self._layer_input(self.embedding[token].float(), hidden)
            query = self._rotate(self._heads("q", x), rows + j)  # [N, A, D]
            if j:
                own_keys.append(self._full(self._rotate(self._heads("k", x), rows + j)))
                own_values.append(self._full(self._heads("v", x)))
            scores = torch.einsum("nad,rad->nar", query, key0).masked_fill(~visible[:, None], float("-inf"))
            own = [(query * key).sum(-1, keepdim=True) for key in own_keys]
            weight = softmax(torch.cat([scores, *own], -1) * self.config["head_dim"] ** -0.5, -1)
            attended = torch.einsum("nar,rad->nad", weight[..., : len(key0)], value0)
            for t, value in enumerate(own_values):
                attended = attended + weight[..., len(key0) + t, None] * value
            if self.config.get("norm_before_residual"):  # speculators' variant, which SGLang does not have
                hidden = self._norm("midlayer.hidden_norm", hidden)
            hidden = hidden + attended.flatten(1) @ self.weights["midlayer.self_attn.o_proj.weight"].T
            hidden = hidden + self._mlp(self._norm("midlayer.post_attention_layernorm", hidden))
            normed = self._norm("norm", hidden)
            token = read(j, normed @ self.weights["lm_head.weight"].T)
            if self.config.get("norm_output"):
                hidden = normed

    def fuse(self, features: Tensor) -> Tensor:
        """fc's output [T, H] for its input [T, n·H]."""
        if norm_before_fc(self.config):
            features = self._norm("input_norm", features)
        if self.config.get("fc_norm"):
            slots = features.chunk(self.config["num_aux_hidden_states"], -1)
            features = torch.cat([self._norm(f"fc_norm.{i}", slot) for i, slot in enumerate(slots)], -1)
        return features @ self.weights["fc.weight"].T

    def _layer_input(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat(
            [self._norm("midlayer.input_layernorm", embedding), self._norm("midlayer.hidden_norm", hidden)], -1
        )

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _heads(self, which: str, x: Tensor) -> Tensor:
        return (x @ self.weights[f"midlayer.self_attn.{which}_proj.weight"].T).unflatten(
            -1, (-1, self.config["head_dim"])
        )

    def _full(self, x: Tensor) -> Tensor:
        """Repeat every key/value head for the query heads that share it."""
        return x.repeat_interleave(self.config["num_attention_heads"] // self.config["num_key_value_heads"], 1)

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        cos, sin = self.rotary(x, position[None])
        return apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
            * self.weights[f"{name}.weight"]
        )


def _read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """config.json and the weights under SGLang's names."""
    config, layout = read_config(folder)
    weights = canonical_names(read_tensors(folder), layout, Report(folder))
    try:
        wrong = {
            name: f"{list(weights[name].shape) if name in weights else 'absent'} instead of {list(shape)}"
            for name, shape in expected_tensors(config, config.get("num_aux_hidden_states", 3), layout).items()
            if name not in weights or tuple(weights[name].shape) != shape
        }
    except KeyError as e:
        wrong = {str(e): "absent in config.json"}
    if layout != "sglang" or wrong:
        name, problem = next(iter(wrong.items()), ("config.json", f"in the layout of {layout}"))
        raise PipelineError(
            f"the exported files cannot be replayed: {name} is {problem}", field=str(folder), fix="make export"
        )
    # SGLang has no such switch, whatever the file says. Only a drafter in memory (`of`), of unknown origin, may have it.
    return {key: value for key, value in config.items() if key != "norm_before_residual"}, weights


# ---------------------------------------------------------------- accuracy, as the trainer's validation counts it

_COUNTS = ("rows", "hits", "reached", "prefix")


@dataclass
class Accuracy:
    """Counts of every sample and step, to be added up before they are divided.

    Attributes:
        counts: [samples, 4, K]: the gated rows of step j; of these, rows whose draft is the target's argmax over its
            full vocabulary (hits); of the gated rows, those right at every earlier step (reached); of these, those right
            at this step as well (prefix): the accepted prefixes that are longer than j.
    """

    counts: Tensor

    @property
    def rows(self) -> list[int]:
        return self.counts[:, 0].sum(0).tolist()

    @property
    def hits(self) -> list[int]:
        return self.counts[:, 1].sum(0).tolist()

    @property
    def reached(self) -> list[int]:
        return self.counts[:, 2].sum(0).tolist()

    @property
    def prefix(self) -> list[int]:
        return self.counts[:, 3].sum(0).tolist()

    def per_step(self) -> list[float]:
        return [h / max(r, 1) for h, r in zip(self.hits, self.rows)]

    def conditional(self) -> list[float]:
        """How often the draft of a step is right where those before it were."""
        return [p / max(r, 1) for p, r in zip(self.prefix, self.reached)]

    def tau_row(self, steps: int) -> float:
        """1 + Σ_{j<steps} prefix_j / rows_j"""
        return 1.0 + sum(p / max(r, 1) for p, r in zip(self.prefix[:steps], self.rows))

    def standard_error(self, what: str, of: str, expected: Sequence[float]) -> list[float]:
        """Of the ratio of two counts, e.g. "hits" of "rows", per step: if these samples were drawn at random from many
        with `expected` ratios.

        Rows of one sample are not independent, so whole samples are what varies: √Σ (hits - expected · rows)² / Σ rows,
        the ratio estimator's (Cochran 1977, "Sampling Techniques", section 2.11) about a ratio that is given.
        """
        part, whole = (self.counts[:, _COUNTS.index(name)].double() for name in (what, of))
        off = part - whole * torch.tensor(expected, dtype=torch.double)
        return (off.square().sum(0).sqrt() / whole.sum(0).clamp(min=1)).tolist()


def gated_rows(generated: Sequence[int], step: int) -> list[int]:
    """Rows i with tokens i+1 … i+2+step all written by the target, the last of which exists."""
    last = len(generated) - 1
    return [i for i in range(last) if i + 2 + step <= last and all(generated[i + 1 : i + 3 + step])]


def teacher_forced_accuracy(
    drafter: ExportedDrafter, samples: Iterable[tuple[Tensor, list[int], Tensor, Tensor]], steps: int
) -> Accuracy:
    """Accuracy of every step over the gated rows.

    Args:
        samples: per sample: ids [T], loss mask, features [T, n·H], and the target's argmax at every token [T]
            (which predicts the next one).
    """
    counts = []
    for ids, generated, features, argmax in samples:
        rows = gated_rows(generated, 0)
        if not rows:
            continue
        index = torch.tensor(rows)
        drafts = drafter.draft(ids, features, index, steps, forced=True)
        right = torch.ones(len(rows), dtype=torch.bool)
        of_sample = torch.zeros(len(_COUNTS), steps, dtype=torch.long)
        for j in range(steps):
            gated = torch.isin(index, torch.tensor(gated_rows(generated, j), dtype=torch.long))
            hit = drafts[:, j] == argmax[(index + 1 + j).clamp(max=len(ids) - 1)]
            reached, right = right & gated, right & hit
            of_sample[:, j] = torch.stack([gated.sum(), (hit & gated).sum(), reached.sum(), (right & gated).sum()])
        counts.append(of_sample)
    return Accuracy(torch.stack(counts) if counts else torch.zeros(0, len(_COUNTS), steps, dtype=torch.long))


# ---------------------------------------------------------------- accept length, as the engine counts it


@dataclass(frozen=True)
class Walk:
    """One request walked as the engine does: drafts accepted in every verification, in order."""

    accepted: list[int]
    """As SGLang's `spec_num_correct_drafts` counts: also drafts that the target confirms past the end of the output."""
    clipped: list[int]
    """Only drafts inside the output, which is what a user gets."""

    @property
    def cycles(self) -> int:
        return len(self.accepted)


def walk(drafts: Tensor, sequence: Sequence[int], first_row: int, end: int) -> Walk:
    """Walk a sequence: draft at a row, accept a tokens, go on a + 1 rows later.

    Args:
        drafts: [rows, K] free-running drafts of the rows first_row, first_row + 1, …
        sequence: prompt, output, and the target's next K greedy tokens after the output (SGLang verifies past the end
            of turn and past the length limit, and counts what it accepts there).
        first_row: the row that reads the first response token, i.e. the last row of the prompt.
        end: index of the output's last token.
    """
    accepted, clipped, row = [], [], first_row
    while row + 1 < end:  # the newest token, row + 1, is not the last one: the engine verifies once more
        draft = drafts[row - first_row].tolist()
        a = 0
        while a < len(draft) and row + 2 + a < len(sequence) and draft[a] == sequence[row + 2 + a]:
            a += 1
        accepted.append(a)
        clipped.append(min(a, end - (row + 1)))
        row += a + 1
    return Walk(accepted, clipped)


def tau(accepted: Iterable[int]) -> float:
    """1 + accepted / cycles, 1.0 where there was no cycle."""
    counts = list(accepted)
    return 1.0 + sum(counts) / max(len(counts), 1)
