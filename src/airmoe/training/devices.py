"""What this machine allows: what `auto` stands for, what is refused, how a model is placed.

Precision and micro-batch change what a run computes, so they are settled once, when it starts, and
stand in its run.json. Compiler and CUDA graphs change its speed only: they are settled in every
process, and where they cannot be had the run takes the slower path to the same result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from airmoe.errors import ConfigError
from airmoe.kernels.backend import backend_for
from airmoe.model import AirMoeConfig, AirMoeForCausalLM, parameter_counts
from airmoe.model.blocks import keep_apart
from airmoe.training.config import Precision, RunConfig, TrainingOptions

GIB = 2**30
# Of a GPU's memory. The rest is for logits and partial sums, which take a share of it (4 %),
# fragments and other programs.
USED_SHARE = 0.76
FIXED_BYTES = 3 * GIB  # the least of both, and libraries
USUAL_VOCABULARY = 2**17  # the text is not prepared yet, so its tokenizer may be unknown
STATE_BYTES = 16  # a parameter, its gradient and two moments in float32

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
FAULT = "this CPU names AMX among its instructions and then refuses it"
REMEDY = f"Set the environment variable {VARIABLE}={WITHOUT_AMX}"
PRODUCT = "import torch; rows = torch.ones(32, 32, dtype=torch.bfloat16); rows @ rows"


@dataclass(frozen=True)
class Machine:
    """What the decisions depend on."""

    processes: int
    cuda: bool = False
    bf16: bool = False  # fast, that is on a GPU
    triton: bool = False
    memory: int = 0  # bytes of one GPU

    @classmethod
    def this(cls, processes: int) -> Self:
        if not torch.cuda.is_available():
            return cls(processes)
        device = torch.device("cuda", torch.cuda.current_device())
        return cls(
            processes,
            cuda=True,
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            triton=backend_for(device, torch.float32) == "triton",
            memory=torch.cuda.get_device_properties(device).total_memory,
        )


def settle(run: RunConfig, machine: Machine) -> tuple[RunConfig, list[str]]:
    """The run with its precision and micro-batch chosen, and a line that says so for each."""
    options, lines = run.training, []
    if options.precision == "auto":
        options = replace(options, precision="bf16" if machine.bf16 else "fp32")
        why = "the GPU supports it" if machine.bf16 else "bfloat16 pays only on a GPU that has it"
        lines.append(f"training.precision=auto: {options.precision}, because {why}")
    if options.micro_batch_size == "auto":
        model = run.model_config(run.model.get("vocab_size") or USUAL_VOCABULARY, eos_id=1)
        size = fitting_micro_batch(options, model, run.data.block_size, machine)
        options = replace(options, micro_batch_size=size)
        lines.append(
            f"training.micro_batch_size=auto: {size} sequences, "
            f"{options.accumulation_steps(machine.processes)} per step and process"
        )
    return replace(run, training=options), lines


def fitting_micro_batch(
    options: TrainingOptions, model: AirMoeConfig, block_size: int, machine: Machine
) -> int:
    """How many of a step's sequences fit a GPU at once; at most 16 on a CPU."""
    most = options.batch_size // machine.processes
    divisors = [n for n in range(1, most + 1) if most % n == 0] or [1]
    if not machine.cuda:
        return max(n for n in divisors if n <= 16)
    free = USED_SHARE * machine.memory - FIXED_BYTES
    free -= STATE_BYTES * parameter_counts(model).total
    sequence = block_size * token_bytes(model)
    return max((n for n in divisors if n * sequence <= free), default=1)


def token_bytes(model: AirMoeConfig) -> int:
    """Memory that a token needs between its forward and backward, not compiled; a high estimate."""
    dense = model.num_hidden_layers * (32 * model.hidden_size + 8 * model.intermediate_size)
    candidates = 4 * model.num_experts_per_tok * model.expert_size  # of a shortlist, for example
    return dense + 16 * candidates * len(model.moe_layers or ())


def settle_speed(options: TrainingOptions, machine: Machine) -> tuple[TrainingOptions, list[str]]:
    """The options with compiler and CUDA graphs on or off, and a line for each that was `auto`."""
    lines = []
    for name, look in (("compile", against_compile), ("cuda_graph", against_cuda_graph)):
        if getattr(options, name) == "auto":
            obstacle = look(options, machine)
            options = replace(options, **{name: obstacle is None})
            text = "on" if obstacle is None else f"off, because {obstacle}"
            lines.append(f"training.{name}=auto: {text}")
    return options, lines


def against_compile(_: TrainingOptions, machine: Machine) -> str | None:
    """Why the layers cannot be compiled; None where they can."""
    if not machine.cuda:
        return "there is no CUDA device"
    return compiler_fault() if machine.triton else "Triton cannot be used"


def compiler_fault() -> str | None:
    """Why a trial compilation failed (old driver, no C compiler); None if it worked."""
    try:
        torch.compile(lambda values: values * 2 + 1)(torch.ones(64, device="cuda"))
    except Exception as error:  # whatever the compiler raises
        return f"a trial failed ({str(error).strip().splitlines()[0]})"
    return None


def against_cuda_graph(options: TrainingOptions, machine: Machine) -> str | None:
    """Why whole micro-batches cannot run as CUDA graphs; None where they can."""
    obstacles = {
        "there is no CUDA device": not machine.cuda,
        f"there are {machine.processes} processes": machine.processes > 1,
        "precision is fp16, whose steps may be skipped": options.precision == "fp16",
        "gradient_checkpointing runs forwards again": options.gradient_checkpointing,
    }
    return next((obstacle for obstacle, holds in obstacles.items() if holds), None)


# -- what is refused ------------------------------------------------------------------------------


def check_device(run: RunConfig, num_processes: int, *, resumes: bool = False) -> None:
    """Refuse what this machine cannot do before the work starts.

    A new sharded run needs several processes; one that resumes may go on with one.
    """
    options = run.training
    if options.precision == "fp16" and not torch.cuda.is_available():
        rule = "needs a GPU, because its loss scaling does"
        remedy = "Use training.precision=bf16 or fp32 here."
        raise ConfigError("training.precision", "fp16", rule, remedy)
    if options.precision == "bf16":
        check_bfloat16("training.precision", "cuda" if torch.cuda.is_available() else "cpu")
    obstacle = against_cuda_graph(options, Machine.this(num_processes))
    if options.cuda_graph is True and obstacle is not None:
        rule = f"is impossible, because {obstacle}"
        remedy = "Set training.cuda_graph=auto, or change that."
        raise ConfigError("training.cuda_graph", True, rule, remedy)
    if options.sharding == "fsdp2" and num_processes == 1 and not resumes:
        remedy = "Start with: torchrun --nproc-per-node N -m airmoe train ..., or leave it at none."
        raise ConfigError("training.sharding", "fsdp2", "needs more than one process", remedy)
    options.accumulation_steps(num_processes)  # refuses what does not divide


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


# -- how a model is placed and computes -----------------------------------------------------------


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
    """Recompute layers in the backward pass; transformers renamed the method in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def compile_layers(model: AirMoeForCausalLM, *, may_fail: bool) -> None:
    """Compile layer by layer: they share one compilation, and parameters keep their names.

    With `may_fail` a layer that does not compile runs as it is, and torch logs why.
    """
    if may_fail:
        torch._dynamo.config.suppress_errors = True
    for layer in model.model.layers:
        layer.compile()
