"""FSDP2: every decoder layer a unit, the rest (embedding, head, last norm) in the root."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from airmoe.model import AirMoeForCausalLM
from airmoe.model.blocks import keep_apart


def shard(model: AirMoeForCausalLM) -> None:
    """Shard parameters over all processes, in place. Before the optimizer is made.

    By hand, because Accelerate offers FSDP2 on accelerators only and makes the tied head a unit of
    its own, whose forward our chunked loss never calls. Parameters stay float32 and autocast
    rounds: a router's scores must not be rounded with the weights.
    """
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                keep_apart(part)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
