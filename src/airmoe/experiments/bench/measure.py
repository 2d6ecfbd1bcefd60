"""One layer of a case: built, checked, then timed; whatever happens becomes a result."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

import torch

from airmoe.experiments.bench.checks import check
from airmoe.experiments.bench.contenders import Contender
from airmoe.experiments.bench.inputs import Shape, make_inputs
from airmoe.experiments.bench.results import Result
from airmoe.experiments.bench.timing import Limits, Step
from airmoe.experiments.bench.work import Ceilings, count_work
from airmoe.kernels.backend import backend_for

SHORT = Limits(repeats=10, seconds=0.5)
Phase = Literal["training", "decoding", "step"]


def measure(
    kind: type[Contender],
    shape: Shape,
    phase: Phase,
    device: torch.device,
    ceilings: Ceilings,
    limits: Limits,
) -> Result:
    """Build, check and time one contender; a wrong one gets no time."""
    result = Result(kind.key, kind.name, kind.role)
    with result.recorded():
        contender, trains = kind(make_inputs(shape, device)), phase == "training"
        inputs = contender.inputs  # with as many experts as the contender has
        backend = backend_for(device, shape.torch_dtype)
        result.backend = "plain PyTorch" if kind.plain else backend
        result.parameter_bytes = sum(value.nbytes for value in contender.parameters().values())
        result.check = check(contender, inputs.batches[0], inputs.cotangent, gradients=trains)
        size = result.parameter_bytes
        work = count_work(inputs.shape, contender.config, size, plain=kind.plain)
        result.work = asdict(work) | {
            "forward_floor_ms": work.floor_ms(ceilings, backward=False),
            "total_floor_ms": work.floor_ms(ceilings, backward=True),
        }
        if result.check.problems:
            result.status, result.reason = "wrong", "; ".join(result.check.problems)
            return result
        free_memory()
        _time(contender, limits, trains, result)
    return result


def measure_alone(kind: type[Contender], *given: Any) -> Result:
    """`measure` in a process of its own, so that heap and peak memory are the contender's alone."""
    result = Result(kind.key, kind.name, kind.role)
    with result.recorded(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(measure, kind, *given).result()
    return result


def free_memory() -> None:
    """Give the last contender's memory on a GPU back."""
    if torch.cuda.is_available():
        gc.collect()
        with suppress(RuntimeError):  # after an error of the device the next contender will say so
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class MicroBatch:
    """Batches in turn through a contender, each in the same place, as CUDA graphs need it."""

    def __init__(self, contender: Contender) -> None:
        self.contender, self.inputs = contender, contender.inputs
        hidden = self.inputs.batches[0].clone()  # [T, D]
        self.hidden = self.output = hidden.requires_grad_(contender.module.training)

    def load(self, number: int) -> None:
        """The next batch. What the last one left goes, so that each pays for dense gradients."""
        self.contender.module.zero_grad(set_to_none=True)
        self.hidden.grad, self.output = None, self.hidden
        batches = self.inputs.batches
        self.hidden.detach().copy_(batches[number % len(batches)])

    def forward(self) -> None:
        self.output = self.contender.forward(self.hidden)

    def backward(self) -> None:
        self.contender.backward(self.output, self.inputs.cotangent)


def _time(contender: Contender, limits: Limits, trains: bool, result: Result) -> None:
    """Time a micro-batch, its memory, and what training does beside it."""
    contender.module.train(trains)
    batch, device = MicroBatch(contender), contender.inputs.device
    step = Step(device, [batch.forward, batch.backward] if trains else [batch.forward], batch.load)
    with torch.set_grad_enabled(trains):
        step.take(0)  # builds what is kept, such as shortlists
        result.peak_bytes = step.peak_bytes()
        result.captured = step.on_gpu and result.backend == "triton"
        if result.captured:  # the time of our kernels, without Python's
            if trains:
                result.apart_ms["without CUDA graph"] = step.totals(SHORT)
            step = step.captured()
        laps = step.sample(limits)
    result.forward_ms = [lap[0] for lap in laps]
    if not trains:
        return
    result.total_ms = [sum(lap) for lap in laps]
    for name, action in contender.apart().items():
        step = Step(device, [action])
        result.apart_ms[name] = (step.captured() if result.captured else step).totals(SHORT)
