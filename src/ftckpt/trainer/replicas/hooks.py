"""How gradients are averaged across replicas so that a peer's death costs one uncommitted step, not the process. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchft.ddp import DistributedDataParallel as FtDistributedDataParallel
from torchft.process_group import ProcessGroupDummy

from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.manager import FtManager

BUCKET_BYTES = 25 << 20


def safe_allreduce_hook(manager: FtManager, model: torch.nn.Module) -> None:
    """Average a model's gradients across replicas, whatever wraps the model.

    * ``DistributedDataParallel`` of torch (see :func:`ddp` for a group of one rank): a comm hook, overlapped with backward. With
      several ranks in the group the group averages first.
    * FSDP2 (``fully_shard``): an all-reduce hook on every sharded module.
    * anything else: the gradients are averaged in ``should_commit``, before the vote; accumulation needs no ``no_sync``.

    Args:
        manager: what ``ckpt.torchft_manager`` returned.
        model: the model that is trained.

    Raises:
        ConfigError: the model has torchft's own wrapper, whose hook ends the survivors when a peer dies.
    """
    if isinstance(model, FtDistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in torchft's DistributedDataParallel, whose hook ends the survivors when a peer dies",
            now="nothing was changed",
            todo="pass the plain module, or wrap it with ftckpt.trainer.replicas.hooks.ddp",
        )
    if isinstance(model, DistributedDataParallel):
        # DDP reads a hook's annotations; a lambda has none
        model.register_comm_hook(model.process_group, lambda group, bucket: _reduce_bucket(manager, group, bucket))
        return

    def reduce(gradient: torch.Tensor) -> None:
        _reduce(manager, gradient)

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_all_reduce_hook(reduce)
    if not sharded:
        manager.before_vote(lambda: average_gradients(manager, model))


def ddp(module: torch.nn.Module) -> DistributedDataParallel:
    """torch's DistributedDataParallel for a replica group of one rank: buckets and overlap, no communication of its own."""
    # find_unused_parameters keeps the buckets as they are: rebuilt ones would differ between a healed replica and the others
    return DistributedDataParallel(module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True)


def average_gradients(manager: FtManager, model: torch.nn.Module) -> None:
    """Average the gradients of a plain module across replicas, in buckets; every trainable parameter takes part.

    A parameter without a gradient anywhere stays without; one that got a gradient on some replica gets the average on all.
    """
    for bucket in _buckets(p for p in model.parameters() if p.requires_grad):
        parts = [_local(p.grad) if p.grad is not None else torch.zeros_like(_local(p.detach())) for p in bucket]
        present = torch.tensor([float(p.grad is not None) for p in bucket], dtype=parts[0].dtype, device=parts[0].device)
        flat = torch.cat([*(part.reshape(-1) for part in parts), present])
        if not _reduce(manager, flat):
            return
        *averaged, present = torch.split(flat, [*(part.numel() for part in parts), len(bucket)])
        for p, part, new, there in zip(bucket, parts, averaged, present.tolist(), strict=True):
            if p.grad is not None:
                _local(p.grad).copy_(new.view_as(part))
            elif there:
                p.grad = torch.zeros_like(p)
                _local(p.grad).copy_(new.view_as(part))


def _reduce(manager: FtManager, tensor: torch.Tensor) -> bool:
    """Average in place; False after an error, which the vote will see."""
    return bool(manager.allreduce(tensor).wait()) and manager.errored() is None


def _reduce_bucket(manager: FtManager, group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    gradient = bucket.buffer()
    if group.size() > 1:
        gradient.div_(group.size())
        dist.all_reduce(gradient, group=group)
    _reduce(manager, gradient)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradient)
    return done


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterable[list[torch.nn.Parameter]]:
    """Consecutive parameters of one dtype and device, at most about ``BUCKET_BYTES`` each; the same on all replicas."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for p in parameters:
        local = _local(p.detach())
        if bucket and (size + local.nbytes > BUCKET_BYTES or (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += local.nbytes
    if bucket:
        yield bucket
