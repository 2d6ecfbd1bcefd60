"""One contender of a case: built, checked, then timed; whatever happens becomes a result."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.experiments.bench.cases import Phase, Shape, make_inputs
from airmoe.experiments.bench.checks import Check, check
from airmoe.experiments.bench.contenders import Contender
from airmoe.experiments.bench.entries import Entry
from airmoe.experiments.bench.timing import (
    Ceilings,
    Limits,
    Step,
    Timer,
    action_in_graph,
    peak_bytes,
    sample,
    step_in_graphs,
    step_of,
)
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


@dataclass(frozen=True)
class Setting:
    """What the contenders of a case share."""

    shape: Shape
    phase: Phase
    device: torch.device
    ceilings: Ceilings
    limits: Limits

    @property
    def timer(self) -> Timer:
        return Timer(self.device)


def measure(entry: Entry, setting: Setting) -> Result:
    """Build, check and time one contender."""
    result = Result(entry.key, entry.name, entry.role)
    with result.recorded():
        contender = _build_and_check(entry, setting, result)
        free_memory()
        if setting.phase == "training":
            _train(contender, setting, result)
        else:
            _decode(contender, setting, result)
    return result


def measure_alone(entry: Entry, setting: Setting) -> Result:
    """`measure` in a process of its own, so that heap and peak memory are the contender's alone."""
    result = Result(entry.key, entry.name, entry.role)
    with result.recorded(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(measure, entry, setting).result()
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


def _build_and_check(entry: Entry, setting: Setting, result: Result) -> Contender:
    """The contender, with answers that were found right."""
    given = make_inputs(setting.shape, setting.device)
    contender = entry.build(given)
    result.backend = "plain PyTorch"
    if not entry.plain:
        result.backend = backend_for(setting.device, given.shape.torch_dtype)
    result.parameter_bytes = sum(value.nbytes for value in contender.module.parameters())
    gradients = setting.phase == "training"
    result.check = check(contender, given.batches[0], given.cotangent, gradients=gradients)
    work = entry.work(given.shape)
    result.work = asdict(work) | {
        "forward_floor_ms": work.floor_ms(setting.ceilings, backward=False),
        "total_floor_ms": work.floor_ms(setting.ceilings, backward=True),
    }
    if result.check.problems:
        raise WrongAnswerError("; ".join(result.check.problems))
    return contender


def _train(contender: Contender, setting: Setting, result: Result) -> None:
    """Time forward and backward, their memory, and what training does beside them."""
    timer = setting.timer
    step = _training_step(contender, timer)
    step(0)
    result.peak_bytes = peak_bytes(timer, lambda: step(0))
    if timer.on_gpu and result.backend == "triton":  # the time of our kernels, without Python's
        result.apart_ms["without CUDA graph"] = [sum(lap) for lap in sample(timer, step, SHORT)]
        step, result.captured = step_in_graphs(timer, contender), True
    laps = sample(timer, step, setting.limits)
    result.forward_ms, result.total_ms = [lap[0] for lap in laps], [sum(lap) for lap in laps]
    for name, action in contender.apart().items():
        if result.captured:
            action = action_in_graph(timer, action)
        laps = sample(timer, step_of(timer, action), SHORT)
        result.apart_ms[name] = [sum(lap) for lap in laps]


def _training_step(contender: Contender, timer: Timer) -> Step:
    """Forward and backward of a micro-batch."""
    inputs = contender.inputs

    def step(number: int) -> Sequence[Any]:
        hidden = inputs.batches[number % len(inputs.batches)]
        marks = [timer.mark()]
        output = contender.forward(hidden.detach().requires_grad_())
        marks.append(timer.mark())
        contender.backward(output, inputs.cotangent)
        marks.append(timer.mark())
        contender.module.zero_grad(set_to_none=True)  # the next step pays for dense gradients again
        return marks

    return step


@torch.no_grad()
def _decode(contender: Contender, setting: Setting, result: Result) -> None:
    """Forwards without gradients, from a CUDA graph where there is a GPU."""
    timer, batches = setting.timer, contender.inputs.batches
    static = batches[0].clone()  # [T, D]
    contender.module.eval()

    def forward() -> Tensor:
        return contender.forward(static)

    forward()  # builds what is kept between forwards, such as shortlists
    result.peak_bytes = peak_bytes(timer, forward)
    action = forward
    if timer.on_gpu and result.backend == "triton":
        action, result.captured = action_in_graph(timer, forward), True
    step = step_of(timer, action, before=lambda n: static.copy_(batches[n % len(batches)]))
    result.forward_ms = [sum(lap) for lap in sample(timer, step, setting.limits)]
