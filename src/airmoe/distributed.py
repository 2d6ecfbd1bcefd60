"""Collectives that do nothing without a process group, decided when they are called.

A router may be built long before `init_process_group`, so nothing here is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from airmoe.errors import ConfigError, RunError

Result = TypeVar("Result")


def is_distributed() -> bool:
    """True when a process group of more than one rank exists now."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def leave_group() -> None:
    """End the process group, if there is one, before this process exits.

    Under torchrun a process that just exits can abort, or make the others abort.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def on_first_rank(job: Callable[[], Result]) -> Result:
    """Run `job` on the first rank; all ranks return its result or raise its error."""
    if not is_distributed():
        return job()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer[0] = job()
        except (ConfigError, RunError, OSError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum over ranks, bit-identical on every rank; the input is left alone."""
    if not is_distributed():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def all_gather_rows(row: Tensor) -> Tensor:
    """Stack one row per rank: [n] -> [world, n]."""
    if not is_distributed():
        return row.unsqueeze(0)
    rows = [torch.empty_like(row) for _ in range(world_size())]
    dist.all_gather(rows, row.contiguous())
    return torch.stack(rows)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, also where FSDP2 holds only a shard of it (outside its forward)."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
