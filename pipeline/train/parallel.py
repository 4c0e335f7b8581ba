"""How several ranks share the drafter: each holds a copy (DDP), or each a part of every tensor (FSDP2).

With `fsdp` weights, gradients, moments and averages are sharded over the ranks; the weights are gathered for a forward
and backward. The drafter is one layer, so it is one unit. accelerate 1.15 knows FSDP2 on GPUs only, so torch's own
`fully_shard` is called: the same code on GPUs and, for tests and small machines, on CPUs with gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from pipeline.train.drafter import TTTOutput

if TYPE_CHECKING:
    from accelerate import Accelerator


def share(model: nn.Module, accelerator: Accelerator, how: str) -> nn.Module:
    """What to call for a forward in training; with `how` = "fsdp" `model` itself is sharded in place.

    All ranks go on with rank 0's parameters.
    """
    if how == "ddp" or accelerator.num_processes == 1:
        return accelerator.prepare_model(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for parameter in model.parameters():  # as DDP does
        torch.distributed.broadcast(parameter.data, src=0)
    # FSDP2 looks for the tensors to hook its backward to in what the forward returns.
    if TTTOutput not in _pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(TTTOutput)
    return fully_shard(model, mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))


@contextlib.contextmanager
def gradients_added_up(model: nn.Module, accelerator: Accelerator, last: bool) -> Iterator[None]:
    """A backward whose gradients meet those of other ranks only if it is the `last` one of the step."""
    if is_sharded(model):
        model.set_requires_gradient_sync(last)
        yield
    else:
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            yield


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Forwards that need no other rank: ranks may run different numbers of them. All ranks enter and leave."""
    if not is_sharded(model):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU. Of a shard: while the other ranks call this or `contribute`."""
    return contribute(tensor).detach().cpu().contiguous()


def contribute(tensor: Tensor) -> Tensor:
    """This rank's share in another rank's `whole`."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(full: Tensor, like: Tensor) -> Tensor:
    """The inverse of `whole`: of a tensor of `like`'s shape this rank's part, if `like` is sharded. Nothing is sent."""
    full = full.to(like.device)
    if not hasattr(like, "full_tensor") or full.shape != like.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def global_norm(norm: Tensor) -> float:
    """The norm over all ranks that `clip_grad_norm_` returned."""
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
