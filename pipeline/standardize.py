"""Stage 3: bind dumped states to slots, check them, and add what training needs besides them.

Hidden states are not copied: at (slots + 1) · H · itemsize bytes per token a second copy is not an option. For every
shard of the dump a small file of the same name is written, row by row in step with it:

    loss_mask       uint8 [rows]   1 where the target generated the token
    teacher_argmax  int32 [rows]   argmax of the target's logits over its full vocabulary (it predicts the next token);
                                   -1 where no row that counts learns from it

with a checksum of both and of the shard's layout in its metadata, so that neither an altered file nor one made for
another dump is taken for a right one. Besides them `vocab.safetensors` (`d2t` int64 [Vd], `t2d` bool [V]) and
`split.json` (sample ids of train and heldout).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import save_safetensors, sha256_json, write_json
from pipeline.manifest import Manifest, Slot
from pipeline.samples import read_samples, samples_file
from pipeline.slots import layers_to_bind, rebound
from pipeline.stage import StageResult
from pipeline.store import HiddenStore, SampleRef, shard_number
from pipeline.target import OutputHead, Target, load_output_head
from pipeline.vocab import DraftVocab, build_vocab

# Logits held at a time: 1024 rows x 8192 tokens x 4 bytes = 32 MiB, whatever the size of the vocabulary.
_ROW_CHUNK, _VOCAB_CHUNK = 1024, 8192


def standardize(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path, *,
                vocab: DraftVocab | None = None) -> StageResult:
    """Run stage 3; see the module's docstring for what it writes.

    Args:
        vocab: the vocabulary of a drafter that is trained already; then no sample need be left to train on.

    Raises:
        PipelineError: a slot's layer was not dumped; a shard is damaged or does not hold the samples of stage 1; no
            held-out sample is left.
    """
    from tqdm import tqdm

    slots = bound_slots(config, manifest)
    store = HiddenStore(dump_shards(manifest, run_dir))
    samples = _read(samples_file(run_dir))
    quarantined = _quarantined(run_dir / "dump" / "quarantine.jsonl")
    _check_complete(store, samples, quarantined)
    device = _device(config)
    head = load_output_head(target).to(device)
    counts = _Counts(target.vocab_size)
    split: dict[str, list[str]] = {"train": [], "heldout": []}
    outputs = []
    by_shard = groupby(store.samples, key=lambda ref: ref.shard)
    for shard, group in tqdm(by_shard, total=len(store.paths), desc="standardize", unit="shard", mininterval=1.0):
        refs = list(group)
        _check_shard(store, refs, samples, slots, target)
        aligned = folder / store.paths[shard].name
        mask = torch.cat([samples[ref.id].loss_mask for ref in refs])
        argmax = _finished(aligned, refs, mask)
        if argmax is None:
            argmax = _teacher_argmax(store, refs, mask, slots["teacher"], head, device)
            save_safetensors(aligned, {"loss_mask": mask, "teacher_argmax": argmax},
                             _checksums(refs, mask, argmax))
        outputs.append(aligned)
        for ref in refs:
            sample, answers = samples[ref.id], argmax[ref.start:ref.start + ref.length]
            counts.add(sample, answers)
            if (answers >= 0).any():  # else the answer is one token long: nothing is drafted in it
                split[sample.split].append(ref.id)
    for part in ("train", "heldout"):
        if not split[part] and (vocab is None or part == "heldout"):
            raise PipelineError(f"no sample is left for {part}", field="prompts.heldout_fraction",
                                value=config.prompts.heldout_fraction,
                                fix='make prompts ARGS="prompts.heldout_fraction=0.3", with '
                                    "at least two conversations whose answers have two or more tokens")
    vocab = vocab or build_vocab(counts.trained["train"], counts.corpus["train"], config.drafter.draft_vocab_size,
                                 always=[t for t in target.eos_token_ids if t < target.vocab_size])
    save_safetensors(folder / "vocab.safetensors", {"d2t": vocab.d2t, "t2d": vocab.t2d})
    write_json(folder / "split.json", split)
    metrics = {f"{part}_{what}_coverage": vocab.coverage(tally[part])
               for what, tally in (("token", counts.trained), ("teacher", counts.teacher)) for part in split}
    print(f"standardize: {len(split['train'])} samples to train on, {len(split['heldout'])} held out, "
          f"{len(quarantined)} quarantined; the draft vocabulary of {vocab.size} tokens covers "
          f"{metrics['train_token_coverage']:.1%} of the trained tokens and "
          f"{metrics['heldout_token_coverage']:.1%} of the held-out ones")
    return StageResult(
        outputs=[*outputs, folder / "vocab.safetensors", folder / "split.json"], slots=slots, metrics=metrics,
        counts={
            "samples": len(store.samples), "quarantined": len(quarantined),
            "train_samples": len(split["train"]), "heldout_samples": len(split["heldout"]),
            "samples_without_gated_rows": len(store.samples) - len(split["train"]) - len(split["heldout"]),
            "rows": sum(ref.length for ref in store.samples), "draft_vocab": vocab.size,
            "distinct_trained_tokens": int((counts.trained["train"] > 0).sum()),
            "trained_tokens": int(counts.trained["train"].sum()),
            "train_rows": int(counts.teacher["train"].sum()), "heldout_rows": int(counts.teacher["heldout"].sum()),
        })


def bound_slots(config: Config, manifest: Manifest) -> dict[str, Slot]:
    """The slots this run trains on: `slots.layers` where it is given, else what the manifest says.

    Raises:
        PipelineError: a wanted layer is not in the dump; the message names the slot, both layers and the command.
    """
    return rebound(manifest, layers_to_bind(config, manifest))


def dump_shards(manifest: Manifest, run_dir: Path) -> list[Path]:
    """The shards that stage 2 recorded, in order; what else lies in the folder does not count."""
    paths = [run_dir / f.path for f in manifest.stages["dump"].outputs if Path(f.path).name.startswith("shard-")]
    return sorted(paths, key=shard_number)


def layout(refs: list[SampleRef]) -> str:
    """Fingerprint of which samples lie where in a shard, whose files of stages 2 and 3 must agree on it."""
    return sha256_json([[ref.id, ref.start, ref.length] for ref in refs])


def layout_of(metadata: dict[str, str] | None) -> str | None:
    """The `layout` an aligned file was made for, from its metadata."""
    return json.loads((metadata or {}).get("checksums", "{}")).get("layout")


def needed_rows(loss_mask: Tensor) -> Tensor:
    """Rows whose target logits some gated row learns from, bool [T].

    Row i at TTT step j is gated iff x_{i+1} … x_{i+2+j} are all generated, and it learns from row r = i+1+j. So r is
    needed only if r ≥ 1 and x_r and x_{r+1} are both generated; then row r-1 learns from it at step 0 already.
    """
    generated = loss_mask.bool()
    needed = torch.zeros_like(generated)
    needed[1:-1] = generated[1:-1] & generated[2:]
    return needed


def full_vocabulary_argmax(final_hidden: Tensor, head: OutputHead) -> Tensor:
    """Argmax of the target's logits over its full vocabulary; ties go to the lowest id.

    The product is taken in fp32 and never rounded: in bf16 neighbouring logits are often equal. Scale and softcap are
    monotone and positive, so they do not move the maximum.

    Args:
        final_hidden: [rows, H] after the final norm, on the head's device.

    Returns:
        [rows] int32.
    """
    answers = torch.empty(len(final_hidden), dtype=torch.int32)
    for start in range(0, len(final_hidden), _ROW_CHUNK):
        x = final_hidden[start:start + _ROW_CHUNK].float()
        best = x.new_full((len(x),), float("-inf"))
        best_id = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for first in range(0, len(head.weight), _VOCAB_CHUNK):
            value, index = (x @ head.weight[first:first + _VOCAB_CHUNK].to(x).T).max(-1)
            higher = value > best
            best = torch.where(higher, value, best)
            best_id = torch.where(higher, index + first, best_id)
        answers[start:start + len(x)] = best_id.int().cpu()
    return answers


def _teacher_argmax(store: HiddenStore, refs: list[SampleRef], mask: Tensor, teacher: Slot, head: OutputHead,
                    device: torch.device) -> Tensor:
    """[rows of the shard] int32, -1 at rows that are not needed."""
    needed = torch.cat([needed_rows(part) for part in mask.split([ref.length for ref in refs])])
    hidden = []
    for ref in refs:
        states = store.rows(ref, teacher.tensor)[needed[ref.start:ref.start + ref.length]]
        if not torch.isfinite(states).all():
            raise _not_finite(store, ref, teacher.tensor)
        hidden.append(states)
    states = torch.cat(hidden).to(device)
    argmax = torch.full((len(mask),), -1, dtype=torch.int32)
    argmax[needed] = full_vocabulary_argmax(head.norm(states) if teacher.norm == "pre" else states, head)
    return argmax


@dataclass(frozen=True)
class _Sample:
    """What this stage keeps of a sample of stage 1, compactly: 5 bytes a token."""

    split: str
    input_ids: Tensor
    loss_mask: Tensor


class _Counts:
    """How often each token occurs, per part: at all, as a trained token, and as the teacher's argmax."""

    def __init__(self, vocab_size: int):
        self.corpus, self.trained, self.teacher = (
            {part: torch.zeros(vocab_size, dtype=torch.int64) for part in ("train", "heldout")} for _ in range(3))

    def add(self, sample: _Sample, answers: Tensor) -> None:
        trained = sample.input_ids[sample.loss_mask.bool()]
        teacher = answers[answers >= 0]
        for tally, ids in ((self.corpus, sample.input_ids), (self.trained, trained), (self.teacher, teacher)):
            counts = tally[sample.split]
            counts += torch.bincount(ids.long(), minlength=len(counts))


def _read(path: Path) -> dict[str, _Sample]:
    return {s.id: _Sample(s.split, torch.tensor(s.input_ids, dtype=torch.int32),
                          torch.tensor(s.loss_mask, dtype=torch.uint8)) for s in read_samples(path)}


def _quarantined(path: Path) -> set[str]:
    """Ids of the samples that the dump refused, each with a reason in the file."""
    if not path.exists():
        return set()
    return {json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}


def _check_complete(store: HiddenStore, samples: dict[str, _Sample], quarantined: set[str]) -> None:
    """Every sample of stage 1 lies in a shard or in the quarantine, not in both, and nothing else does."""
    dumped = {ref.id for ref in store.samples}
    for what, ids in (("are neither in a shard nor in the quarantine", samples.keys() - dumped - quarantined),
                      ("are in the dump but not in samples.parquet", (dumped | quarantined) - samples.keys()),
                      ("are both in a shard and in the quarantine", dumped & quarantined)):
        if ids:
            raise PipelineError(f"{len(ids)} samples {what}, e.g. {min(ids)!r}", field="dump/", fix="make dump")
    if not dumped:
        raise PipelineError("the dump holds no sample: all were quarantined", field="dump/quarantine.jsonl",
                            value=f"{len(quarantined)} samples", fix="read the reasons in that file, then: make dump")


def _check_shard(store: HiddenStore, refs: list[SampleRef], samples: dict[str, _Sample], slots: dict[str, Slot],
                 target: Target) -> None:
    """Tensors of all slots are there with the right width and a float type, and token ids are those of stage 1."""
    path = store.paths[refs[0].shard]
    fix = f"rm {path}, then: make dump (only its samples are dumped again)"
    for name, slot in slots.items():
        states = store.rows(refs[0], slot.tensor)
        if states.shape != (refs[0].length, target.hidden_size) or not states.is_floating_point():
            raise PipelineError(f"{slot.tensor} (slot {name}) should be floats [rows, {target.hidden_size}]",
                                field=str(path), value=f"{states.dtype} {list(states.shape)}", fix=fix)
        if not torch.isfinite(states).all():
            raise _not_finite(store, refs[0], slot.tensor)
    for ref in refs:
        if not torch.equal(store.input_ids(ref), samples[ref.id].input_ids.long()):
            raise PipelineError(f"sample {ref.id!r} has other token ids in the dump than in samples.parquet",
                                field=str(path), value=f"{ref.length} rows, {len(samples[ref.id].input_ids)} tokens",
                                fix=fix)


def _not_finite(store: HiddenStore, ref: SampleRef, tensor: str) -> PipelineError:
    path = store.paths[ref.shard]
    return PipelineError(f"{tensor} of sample {ref.id!r} holds NaN or infinity", field=str(path),
                         fix=f"rm {path}, then: make dump (which quarantines such samples)")


def _finished(path: Path, refs: list[SampleRef], mask: Tensor) -> Tensor | None:
    """The argmax of a right file that an interrupted run of this stage left, else None."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata, found, argmax = file.metadata(), file.get_tensor("loss_mask"), file.get_tensor("teacher_argmax")
    except (OSError, SafetensorError):
        return None
    return argmax if torch.equal(found, mask) and metadata == _checksums(refs, mask, argmax) else None


def _checksums(refs: list[SampleRef], mask: Tensor, argmax: Tensor) -> dict[str, str]:
    """Metadata of an aligned file. One entry: safetensors writes several in a random order, and bytes should repeat."""
    content = hashlib.sha256(mask.numpy().tobytes() + argmax.numpy().tobytes()).hexdigest()
    return {"checksums": json.dumps({"layout": layout(refs), "content": content})}


def _device(config: Config) -> torch.device:
    from pipeline.engines.engine import resolve_device

    return torch.device(resolve_device(config.device))
