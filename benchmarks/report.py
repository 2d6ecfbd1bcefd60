"""From results to a table, to ratios, to the lines at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Result, Sample

GIB = 2**30


@dataclass(frozen=True)
class Ratio:
    """One number to remember, and what it is held against."""

    name: str
    value: float | None  # None where a contender got no time
    target: float | None  # None where the size is not the one the target is about
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    def __str__(self) -> str:
        value = "no answer" if self.value is None else f"{self.value:.2f}"
        if self.target is None:
            return f"{self.name}: {value}"
        sign = ">=" if self.better == "higher" else "<="
        verdict = {None: "not measured", True: "met", False: "missed"}[self.met]
        return f"{self.name}: {value} (target {sign} {self.target:g}: {verdict})"


def comparison_ratios(air: Result, other: Result, label: str) -> list[Ratio]:
    """How many times faster AIR is, and its share of the memory."""
    known = air.status == other.status == "timed"
    faster = other.median("total") / air.median("total") if known else None
    memory = air.peak_bytes / max(1, other.peak_bytes) if known else None
    return [
        Ratio(f"{label}: times faster, forward + backward", faster, 6.0, "higher"),
        Ratio(f"{label}: peak memory of AIR / theirs", memory, 0.25, "lower"),
    ]


def growth_ratio(small: Result, large: Result, label: str) -> Ratio:
    """What more experts do to a forward."""
    known = small.status == large.status == "timed"
    value = large.median("forward") / small.median("forward") if known else None
    return Ratio(label, value, 1.5, "lower")


def print_group(console: Console, title: str, results: Sequence[Result]) -> None:
    """One table: medians, range, memory."""
    table = Table(title=f"{title}: seconds, peak memory in GiB", title_justify="left", box=SIMPLE)
    table.add_column("layer", no_wrap=True)
    for heading in ("forward", "backward", "total", "min-max", "peak", "n"):
        table.add_column(heading, justify="right")
    for result in results:
        if result.status != "timed":
            table.add_row(result.name, f"[red]{result.status}[/red]")
            continue
        table.add_row(result.name, *_cells(result.samples))
        if result.with_refresh:
            table.add_row(f"{result.name} + refresh", *_cells(result.with_refresh))
    console.print(table)
    for result in results:
        if result.status != "timed":
            console.print(f"{result.name}: {result.status}: {result.reason}", style="red")


def print_linear_costs(console: Console, results: Sequence[Result]) -> None:
    """What is O(E) by nature and therefore stands apart."""
    for result in results:
        if result.status == "timed":
            console.print(
                f"{result.name}: refresh {result.refresh_seconds or 0:.2f} s per optimizer step; "
                f"dense gradient buffers {result.parameter_bytes / GIB:.2f} GiB, "
                f"{result.gradient_seconds:.2f} s to make and zero them"
            )


def _cells(samples: Sequence[Sample]) -> list[str]:
    totals = [sample.total for sample in samples]
    return [
        f"{median(sample.forward for sample in samples):.3f}",
        f"{median(sample.backward for sample in samples):.3f}",
        f"{median(totals):.3f}",
        f"{min(totals):.3g}-{max(totals):.3g}",
        f"{max(sample.peak_bytes for sample in samples) / GIB:.2f}",
        str(len(samples)),
    ]
