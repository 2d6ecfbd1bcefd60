"""What this machine allows: precisions, and one model on several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from airmoe.errors import ConfigError
from airmoe.model import AirMoeForCausalLM
from airmoe.model.blocks import keep_apart
from airmoe.training.automatic import Machine, against_cuda_graph
from airmoe.training.config import Precision, RunConfig

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
FAULT = "this CPU names AMX among its instructions and then refuses it"
REMEDY = f"Set the environment variable {VARIABLE}={WITHOUT_AMX}"
PRODUCT = "import torch; rows = torch.ones(32, 32, dtype=torch.bfloat16); rows @ rows"


def check_device(run: RunConfig, num_processes: int) -> None:
    """Refuse what this machine cannot do before the work starts."""
    options = run.training
    if options.precision == "fp16" and not torch.cuda.is_available():
        rule = "needs a GPU, because its loss scaling does"
        remedy = "Use training.precision=bf16 or fp32 here."
        raise ConfigError("training.precision", "fp16", rule, remedy)
    if options.precision == "bf16":
        check_bfloat16("training.precision", "cuda" if torch.cuda.is_available() else "cpu")
    obstacle = against_cuda_graph(options, Machine.this(num_processes))
    if options.cuda_graph is True and obstacle is not None:
        remedy = "Set training.cuda_graph=auto, or change that."
        raise ConfigError("training.cuda_graph", True, f"cannot be, because {obstacle}", remedy)


def check_sharding(run: RunConfig, num_processes: int) -> None:
    """A new sharded run needs several processes; a resumed one may go on with one."""
    if run.training.sharding == "fsdp2" and num_processes == 1:
        remedy = "Start with: torchrun --nproc-per-node N -m airmoe train ..., or leave it at none."
        raise ConfigError("training.sharding", "fsdp2", "needs more than one process", remedy)


@cache
def product_kills() -> bool:
    """True where a bfloat16 product kills the process, as on some virtual machines.

    Tried in a process of its own, which takes a second or two, and only where AMX is listed.
    """
    if os.environ.get(VARIABLE) == WITHOUT_AMX or not torch.cpu._is_amx_tile_supported():
        return False
    tried = subprocess.run([sys.executable, "-P", "-c", PRODUCT], capture_output=True)
    return tried.returncode == -signal.SIGILL


def check_bfloat16(field: str, device_type: str) -> None:
    """Raise where computing in bf16 would kill this process."""
    if device_type == "cpu" and product_kills():
        raise ConfigError(
            field, "bf16", f"kills the process here, because {FAULT}", f"{REMEDY}, or use fp32."
        )


def autocast_of(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a run of this precision computes."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        return nullcontext()
    if precision == "bf16":
        check_bfloat16("training.precision", device.type)
    return torch.autocast(device.type, dtype=dtypes[precision])


def placed(model: AirMoeForCausalLM, accelerator: Accelerator, run: RunConfig) -> nn.Module:
    """The model on its device; on several processes in DDP, or sharded in place by FSDP2.

    Every decoder layer is a unit; embedding, head and last norm are in the root. By hand, because
    Accelerate offers FSDP2 on accelerators only and makes the tied head a unit of its own, whose
    forward our chunked loss never calls. Parameters stay float32 and autocast rounds: a router's
    scores must not be rounded with the weights.
    """
    if run.training.sharding != "fsdp2" or accelerator.num_processes == 1:
        return accelerator.prepare_model(model)
    model.to(accelerator.device)  # pyright: ignore[reportArgumentType]
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                keep_apart(part)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def checkpoint_activations(model: AirMoeForCausalLM) -> None:
    """Recompute layers in backward, by the name that transformers has for it since 5.23, or had."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
