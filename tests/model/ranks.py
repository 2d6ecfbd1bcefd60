"""What each rank does; a module of its own, so that the processes can import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from airmoe import track_optimizer
from airmoe.distributed import full_tensor
from tests.model.common import batch, build

ROWS = ((3, 1), (2, 2))  # rows of each rank in the window's two micro-batches


def window(rank: int | None, join: Callable[[], None]) -> dict[str, Tensor]:
    """Losses and gradients of one accumulation window; `rank = None` holds the rows of all.

    What the Trainer does: the loss times the number of ranks, gradients averaged over them.
    """
    options = {"router_options": {"jitter_std": 0.0}, "load_balance_weight": 0.5}
    model: Any = build("topk", **options).train()
    called, factor = model, 1
    if rank is not None:
        join()
        called, factor = DistributedDataParallel(model, broadcast_buffers=False), len(ROWS[0])
    losses = []
    for index, sizes in enumerate(ROWS):
        ids = batch(50 + index, (4, 12))
        if rank is not None:
            ids = ids.split(list(sizes))[rank]
        loss = called(ids, labels=ids, num_items_in_batch=2 * 4 * 11).loss
        (loss * factor).backward()
        losses.append(loss.detach())
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return {**gradients, "loss": torch.stack(losses).sum()}


def sharded(rank: int | None, join: Callable[[], None]) -> dict[str, Tensor]:
    """Two steps with every decoder layer a unit of FSDP2; `rank = None` holds the rows of all."""
    model: Any = build("air", router_options={"num_codewords": 3, "jitter_std": 0.0}).train()
    if rank is not None:
        join()
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    track_optimizer(model, optimizer)
    losses = []
    for index in range(2):
        ids = batch(60 + index, (4, 12))
        if rank is not None:
            ids = ids.split(2)[rank]
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {name: full_tensor(value).clone() for name, value in model.state_dict().items()}
    # Seeds are drawn by each process for itself.
    kept = {name: value for name, value in state.items() if not name.endswith("seed")}
    return {**kept, "loss": torch.stack(losses)}
