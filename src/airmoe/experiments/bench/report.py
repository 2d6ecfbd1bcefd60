"""Tables and closing lines, from results in the layout of the JSON files."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from airmoe.errors import say

GIB = 2**30
HEADINGS = ("forward ms", "total ms", "min-max", "tokens/s", "peak GiB", "of floor", "error", "n")
LEGEND = (
    "ms are medians of n; total is forward + backward; of floor is the least possible time over "
    "the measured; error is a share of the allowed one"
)
Content = dict[str, Any]  # of one JSON file, or one result in it


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
    table = Table(box=SIMPLE)
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
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
    samples = {"forward": result["forward_ms"], "in all": result["total_ms"]}
    parts = [f"{what} {median(laps):.3g} ms" for what, laps in samples.items() if laps]
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
        f"{floor / median(samples):.1%}" if floor else "-",
        f"{checked['worst_share']:.2f}" if checked else "-",
        str(len(samples)),
    ]


def _peak(result: Content) -> str:
    peak = result["peak_bytes"]
    return "-" if peak is None else f"{peak / GIB:.2f}"
