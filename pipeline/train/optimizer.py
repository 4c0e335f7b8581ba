"""AdamW over the drafter: torch's own, fused, or bitsandbytes' with moments in 8 bits."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.config import TrainConfig
from pipeline.errors import PipelineError


def make_optimizer(model: nn.Module, c: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only. Parameters and updates are fp32 in every case.

    `adamw8bit` keeps both moments in 8 bits, in blocks with a scale each (Dettmers et al. 2022, arXiv 2110.02861): 2
    bytes a parameter instead of 8. Tensors below 4096 elements keep theirs in fp32.

    Raises:
        PipelineError: bitsandbytes is not installed.
    """
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": c.weight_decay},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    if c.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as e:
        raise PipelineError(
            "train.optimizer=adamw8bit needs bitsandbytes, which is not installed", field="train.optimizer",
            value=c.optimizer, fix='.venv/bin/pip install "bitsandbytes>=0.50", or train.optimizer=adamw') from e
    return AdamW8bit(groups, lr=c.lr, betas=c.betas)
