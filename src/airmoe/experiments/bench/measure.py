"""One contender of a case: built, checked, then timed; whatever happens becomes a result."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from airmoe.errors import ConfigError
from airmoe.experiments.bench.cases import Case
from airmoe.experiments.bench.checks import Check, check
from airmoe.experiments.bench.contenders import Contender
from airmoe.experiments.bench.inputs import make_inputs
from airmoe.experiments.bench.timing import Limits, Timer, in_graphs, peak_bytes, sample, step_of
from airmoe.experiments.bench.work import Ceilings, count_work
from airmoe.kernels.backend import backend_for

Status = Literal["timed", "wrong", "skipped", "out of memory", "failed"]
GIB = 2**30
SHORT = Limits(repeats=10, seconds=0.5)
LOG = logging.getLogger("airmoe")
ASKED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB)")


class WrongAnswerError(RuntimeError):
    """The contender is wrong, so it gets no time."""


@dataclass
class Result:
    """Everything measured of one contender; times in milliseconds."""

    key: str
    name: str
    role: str
    status: Status = "timed"
    reason: str = ""
    backend: str = ""
    check: Check | None = None
    captured: bool = False  # in a CUDA graph
    peak_bytes: int | None = None
    parameter_bytes: int = 0
    forward_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)  # forward + backward
    apart_ms: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        content = vars(self) | {"check": self.check and self.check.as_json()}
        if self.status == "timed":
            measured = {"forward_ms": self.forward_ms, "total_ms": self.total_ms}
            content["median"] = {name: median(laps) for name, laps in measured.items() if laps}
            content["apart_median_ms"] = {n: median(laps) for n, laps in self.apart_ms.items()}
        return content

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep an error in the block as the result, so that the other contenders go on."""
        try:
            yield
        except ConfigError as error:  # a shape or a machine that this layer does not support
            self.status, self.reason = "skipped", str(error)
        except WrongAnswerError as error:
            self.status, self.reason = "wrong", str(error)
        except torch.OutOfMemoryError as error:
            self.status, self.reason = "out of memory", _needs(str(error))
        except Exception as error:  # a kernel that does not compile must not end the others' run
            LOG.exception("%s failed", self.name)
            first_line = str(error).strip().partition("\n")[0]
            self.status, self.reason = "failed", f"{type(error).__name__}: {first_line}"


def measure(
    kind: type[Contender], case: Case, device: torch.device, ceilings: Ceilings, limits: Limits
) -> Result:
    """Build, check and time one contender; a wrong one gets no time."""
    result = Result(kind.key, kind.name, kind.role)
    with result.recorded():
        contender = kind(make_inputs(case.shape, device))
        inputs = contender.inputs
        backend = backend_for(device, inputs.shape.torch_dtype)
        result.backend = "plain PyTorch" if kind.plain else backend
        result.parameter_bytes = sum(value.nbytes for value in contender.parameters().values())
        trains = case.phase == "training"
        result.check = check(contender, inputs.batches[0], inputs.cotangent, gradients=trains)
        work = count_work(inputs.shape, contender.config, plain=kind.plain)
        result.work = asdict(work) | {
            "forward_floor_ms": work.floor_ms(ceilings, backward=False),
            "total_floor_ms": work.floor_ms(ceilings, backward=True),
        }
        if result.check.problems:
            raise WrongAnswerError("; ".join(result.check.problems))
        free_memory()
        _time(contender, Timer(device), limits, trains, result)
    return result


def measure_alone(kind: type[Contender], *given: Any) -> Result:
    """`measure` in a process of its own, so that heap and peak memory are the contender's alone."""
    result = Result(kind.key, kind.name, kind.role)
    with result.recorded(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(measure, kind, *given).result()
    return result


def _needs(message: str) -> str:
    """The memory it needs: what it had, and what it asked for in vain."""
    asked = ASKED.search(message)
    if asked is None:
        return "out of memory"
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    wanted = allocated / GIB + float(asked[1]) / (1 if asked[2] == "GiB" else 1024)
    return f"out of memory, needs about {wanted:.0f} GiB"


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


def _time(contender: Contender, timer: Timer, limits: Limits, trains: bool, result: Result) -> None:
    """Time a micro-batch, its memory, and what training does beside it."""
    contender.module.train(trains)
    batch = MicroBatch(contender)
    actions = [batch.forward, batch.backward] if trains else [batch.forward]
    with torch.set_grad_enabled(trains):
        step = step_of(timer, *actions, before=batch.load)
        step(0)  # builds what is kept, such as shortlists
        batch.load(0)
        result.peak_bytes = peak_bytes(timer, lambda: step(0))
        result.captured = timer.on_gpu and result.backend == "triton"
        if result.captured:  # the time of our kernels, without Python's
            if trains:
                result.apart_ms["without CUDA graph"] = _totals(sample(timer, step, SHORT))
            replays = in_graphs(timer, *actions, before=lambda: batch.load(0))
            step = step_of(timer, *replays, before=batch.load)
        laps = sample(timer, step, limits)
    result.forward_ms = [lap[0] for lap in laps]
    if not trains:
        return
    result.total_ms = _totals(laps)
    for name, action in contender.apart().items():
        actions = in_graphs(timer, action) if result.captured else [action]
        result.apart_ms[name] = _totals(sample(timer, step_of(timer, *actions), SHORT))


def _totals(laps: list[list[float]]) -> list[float]:
    return [sum(lap) for lap in laps]
