"""One contender of a case: built, checked, then timed; whatever happens becomes a result."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.experiments.bench.cases import Phase
from airmoe.experiments.bench.checks import Check, check
from airmoe.experiments.bench.contenders import Contender, NotHereError
from airmoe.experiments.bench.entries import Entry, backend
from airmoe.experiments.bench.inputs import Inputs
from airmoe.experiments.bench.timing import (
    Ceilings,
    Limits,
    Step,
    Timer,
    action_in_graph,
    in_graphs,
    peak_bytes,
    sample,
    step_of,
)

Status = Literal["timed", "wrong", "skipped", "out of memory", "failed"]
MOST_PARTS = 16
GIB = 2**30
SHORT = Limits(repeats=10, seconds=0.5)
LOG = logging.getLogger("airmoe")
ASKED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB)")


@dataclass
class Result:
    """All that was seen of one contender; times in milliseconds."""

    key: str
    name: str
    role: str
    status: Status = "timed"
    reason: str = ""
    backend: str = ""
    check: Check | None = None
    parts: int = 1  # the batch was run in so many micro-batches, because it did not fit
    captured: bool = False  # in a CUDA graph
    peak_bytes: int | None = None
    parameter_bytes: int = 0
    forward_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)  # forward + backward
    apart_ms: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)

    def add(self, laps: Sequence[Sequence[float]]) -> None:
        """Samples of `training_step`."""
        self.forward_ms += [sum(lap[::2]) for lap in laps]
        self.total_ms += [sum(lap) for lap in laps]

    def as_json(self) -> dict[str, Any]:
        content = vars(self) | {"check": self.check and self.check.as_json()}
        if self.status == "timed":
            measured = {"forward_ms": self.forward_ms, "total_ms": self.total_ms}
            content["median"] = {name: median(laps) for name, laps in measured.items() if laps}
            content["apart_median_ms"] = {n: median(laps) for n, laps in self.apart_ms.items()}
        return content


@dataclass(frozen=True)
class Setting:
    """What the contenders of a case share."""

    inputs: Inputs
    phase: Phase
    timer: Timer
    ceilings: Ceilings
    limits: Limits


def measure(entry: Entry, setting: Setting) -> Result:
    """Build, check and time one contender; in parts where it may and must."""
    whole = result = _attempt(entry, setting, 1)
    while result.status == "out of memory" and entry.splits and result.parts < MOST_PARTS:
        free_memory()
        result = _attempt(entry, setting, 2 * result.parts)
    if result is not whole and result.status == "timed":
        result.reason = f"in one part {whole.reason}"
    return result


def _attempt(entry: Entry, setting: Setting, parts: int) -> Result:
    result = Result(entry.key, entry.name, entry.role, parts=parts)

    def attempt() -> None:
        with backend(entry, setting.inputs) as result.backend:
            contender = build_and_check(entry, setting, result)
            if contender is None:
                return
            free_memory()
            if setting.phase == "training":
                _train(contender, setting, result, in_graph=not entry.splits)
            else:
                _decode(contender, setting, result)

    return guarded(result, attempt)


def guarded(result: Result, attempt: Callable[[], None]) -> Result:
    """What goes wrong is the result of this one; the others go on."""
    try:
        attempt()
    except (NotHereError, ConfigError) as error:  # a shape that this layer does not take
        result.status, result.reason = "skipped", str(error)
    except torch.OutOfMemoryError as error:
        result.status, result.reason = "out of memory", _needs(str(error))
    except Exception as error:  # a kernel that does not compile must not end the others' run
        LOG.exception("%s failed", result.name)
        result.status, result.reason = "failed", f"{type(error).__name__}: {_first_line(error)}"
    return result


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _needs(message: str) -> str:
    """From what was allocated, and what was asked for in vain."""
    asked = ASKED.search(message)
    if asked is None:
        return "out of memory"
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    wanted = allocated / GIB + float(asked[1]) / (1 if asked[2] == "GiB" else 1024)
    return f"out of memory, needs about {wanted:.0f} GiB"


def free_memory() -> None:
    """Nothing of the last contender may stay behind on a GPU."""
    if torch.cuda.is_available():
        gc.collect()
        with suppress(RuntimeError):  # after an error of the device the next contender will say so
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def build_and_check(entry: Entry, setting: Setting, result: Result) -> Contender | None:
    """A contender, if its answers are right."""
    inputs = entry.inputs(setting.inputs)
    contender = entry.build(inputs)
    result.parameter_bytes = sum(value.nbytes for value in contender.module.parameters())
    hidden, cotangent = (
        tensor.chunk(result.parts)[0] for tensor in (inputs.batches[0], inputs.cotangent)
    )
    gradients = setting.phase == "training"
    result.check = check(contender, hidden, cotangent, gradients=gradients)
    work = entry.work(inputs.shape)
    result.work = asdict(work) | {
        "forward_floor_ms": work.floor_ms(setting.ceilings, backward=False),
        "total_floor_ms": work.floor_ms(setting.ceilings, backward=True),
    }
    if not result.check.problems:
        return contender
    result.status, result.reason = "wrong", "; ".join(result.check.problems)
    return None


def _train(contender: Contender, setting: Setting, result: Result, *, in_graph: bool) -> None:
    step = training_step(contender, setting, result.parts)
    step(0)
    result.peak_bytes = peak_bytes(setting.timer, lambda: step(0))
    if in_graph and result.backend == "triton" and setting.timer.on_gpu:
        step = _captured(contender, setting, step, result)
    result.add(sample(setting.timer, step, setting.limits))
    time_apart(contender, setting, result)


def time_apart(contender: Contender, setting: Setting, result: Result) -> None:
    """What belongs to training but not to every forward."""
    timer = setting.timer
    for name, action in contender.apart().items():
        if result.captured:
            action = action_in_graph(timer, action)
        laps = sample(timer, step_of(timer, action), SHORT)
        result.apart_ms[name] = [sum(lap) for lap in laps]


def _captured(contender: Contender, setting: Setting, eager: Step, result: Result) -> Step:
    """The step in CUDA graphs: what our kernels take, not their Python.

    The same step launched one by one is measured too, and kept apart.
    """
    timer, inputs, module = setting.timer, setting.inputs, contender.module
    laps = sample(timer, eager, SHORT)
    try:
        step = in_graphs(timer, contender.forward, module, inputs.batches, inputs.cotangent)
    except RuntimeError as error:
        result.reason = f"no CUDA graph: {_first_line(error)}"
        return eager
    result.captured = True
    result.apart_ms["launched one by one"] = [sum(lap) for lap in laps]
    return step


def training_step(contender: Contender, setting: Setting, parts: int) -> Step:
    """Forward and backward of a micro-batch; laps are forward, backward, forward, ... by parts."""
    inputs, timer = setting.inputs, setting.timer

    def step(number: int) -> Sequence[Any]:
        batch = inputs.batches[number % len(inputs.batches)]
        marks = [timer.mark()]
        pieces = zip(batch.chunk(parts), inputs.cotangent.chunk(parts), strict=True)
        for hidden, cotangent in pieces:
            output = contender.forward(hidden.detach().requires_grad_())
            marks.append(timer.mark())
            contender.backward(output, cotangent)
            marks.append(timer.mark())
        contender.module.zero_grad(set_to_none=True)  # the next step pays for dense gradients again
        return marks

    return step


@torch.no_grad()
def _decode(contender: Contender, setting: Setting, result: Result) -> None:
    """Forwards without gradients, from a CUDA graph where there is a GPU."""
    timer, batches = setting.timer, setting.inputs.batches
    static = batches[0].clone()  # [T, D]
    contender.module.eval()

    def forward() -> Tensor:
        return contender.forward(static)

    forward()  # what is made once and kept, such as shortlists, is not decoding
    result.peak_bytes = peak_bytes(timer, forward)
    action = forward
    if timer.on_gpu:
        try:
            action, result.captured = action_in_graph(timer, forward), True
        except RuntimeError as error:
            result.reason = f"no CUDA graph: {_first_line(error)}"
    step = step_of(timer, action, before=lambda n: static.copy_(batches[n % len(batches)]))
    result.forward_ms = [sum(lap) for lap in sample(timer, step, setting.limits)]
