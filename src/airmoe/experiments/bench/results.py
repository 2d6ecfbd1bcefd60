"""What was measured of a contender, and the tables of a case in the layout of its JSON file."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from airmoe.errors import ConfigError, say
from airmoe.experiments.bench.checks import Check

Status = Literal["timed", "wrong", "skipped", "out of memory", "failed"]
GIB = 2**30
LOG = logging.getLogger("airmoe")
ASKED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB)")
HEADINGS = ("forward ms", "total ms", "min-max", "tokens/s", "peak GiB", "of floor", "error", "n")
LEGEND = (
    "ms are medians of n; total is forward + backward; of floor is the least possible time over "
    "the measured; error is a share of the allowed one"
)
Content = dict[str, Any]  # of one JSON file, or one result in it


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

    def as_json(self) -> Content:
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
        except torch.OutOfMemoryError as error:
            self.status, self.reason = "out of memory", _needs(str(error))
        except Exception as error:  # a kernel that does not compile must not end the others' run
            LOG.exception("%s failed", self.name)
            first_line = str(error).strip().partition("\n")[0]
            self.status, self.reason = "failed", f"{type(error).__name__}: {first_line}"


def _needs(message: str) -> str:
    """The memory it needs: what it had, and what it asked for in vain."""
    asked = ASKED.search(message)
    if asked is None:
        return "out of memory"
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    wanted = allocated / GIB + float(asked[1]) / (1 if asked[2] == "GiB" else 1024)
    return f"out of memory, needs about {wanted:.0f} GiB"


def timed(content: Content) -> list[Content]:
    """The results with a time."""
    return [result for result in content["results"] if result["status"] == "timed"]


def typical(result: Content) -> float:
    """Milliseconds of forward + backward, or of the forward where there is no backward."""
    middle = result["median"]
    return middle["total_ms"] if "total_ms" in middle else middle["forward_ms"]


def fastest(content: Content, role: str) -> Content | None:
    """The fastest right answer of AIR ("air") or of another granular layer ("baseline")."""
    candidates = [result for result in timed(content) if result["role"] == role]
    return min(candidates, key=typical, default=None)


def print_case(console: Console, content: Content) -> None:
    """The table of a case, what was timed apart, and how AIR compares."""
    console.print(f"\n{content['case']}: {content['shape_text']}", style="bold", highlight=False)
    numbers = [Column(heading, justify="right", no_wrap=True) for heading in HEADINGS]
    table = Table(Column(no_wrap=True), *numbers, box=SIMPLE)
    for result in sorted(timed(content), key=typical):
        in_graph = result["captured"] and content["phase"] != "step"  # whose name says it
        table.add_row(result["name"] + (", CUDA graph" if in_graph else ""), *_cells(result))
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    for result in timed(content):
        parts = [f"{name} {ms:.3g} ms" for name, ms in result["apart_median_ms"].items()]
        if parts:
            say(console, f"{result['name']}: {', '.join(parts)}")
    ours, other = fastest(content, "air"), fastest(content, "baseline")
    if ours and other:
        say(
            console,
            f"{content['case']}: {ours['name']}, {typical(ours):.3g} ms, is "
            f"{typical(other) / typical(ours):.3g} times as fast as the fastest granular "
            f"baseline, {other['name']}, {typical(other):.3g} ms",
        )


def summary(result: Content) -> str:
    """The times in a few words, or why there are none."""
    if result["status"] == "out of memory":
        return result["reason"]
    if result["status"] != "timed":
        return f"{result['status']}: {result['reason']}"
    words = {"forward_ms": "forward", "total_ms": "in all"}
    parts = [f"{words[name]} {ms:.3g} ms" for name, ms in result["median"].items()]
    return ", ".join([*parts, f"{_peak(result)} GiB"])


def _cells(result: Content) -> list[str]:
    samples = result["total_ms"] or result["forward_ms"]  # decoding has no backward
    middle, work, checked = result["median"], result["work"], result["check"]
    floor = work.get("total_floor_ms" if result["total_ms"] else "forward_floor_ms")
    return [
        *(f"{middle[name]:.3f}" if name in middle else "-" for name in ("forward_ms", "total_ms")),
        f"{min(samples):.3g}-{max(samples):.3g}",
        f"{median(work['tokens_per_second']):,.0f}" if "tokens_per_second" in work else "-",
        _peak(result),
        f"{floor / typical(result):.1%}" if floor else "-",
        f"{checked['worst_share']:.2f}" if checked else "-",
        str(len(samples)),
    ]


def _peak(result: Content) -> str:
    peak = result["peak_bytes"]
    return "-" if peak is None else f"{peak / GIB:.2f}"
