"""Tables and closing lines, from results in the layout of the JSON files."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

GIB = 2**30
HEADINGS = (
    *("forward ms", "total ms", "min-max", "peak GiB", "TFLOP/s", "executed"),
    *("of floor", "error", "n"),
)
STEP_HEADINGS = ("tokens/s", "step ms", "forward", "backward", "optimizer", "peak GiB", "n")
LEGEND = (
    "total is forward + backward; TFLOP/s counts what the method needs, executed what was "
    "computed; of floor is the least possible time over the measured; error is a share of the "
    "allowed one"
)
Content = dict[str, Any]  # of one JSON file, or one result in it


def timed(content: Content, key: str | None = None) -> list[Content]:
    """The results with a time, of one contender or all."""
    return [
        result
        for result in content["results"]
        if result["status"] == "timed" and key in (None, result["key"])
    ]


def typical(result: Content) -> float:
    """Milliseconds of forward + backward, or of the forward where there is no backward."""
    middle = result["median"]
    return middle["total_ms"] if "total_ms" in middle else middle["forward_ms"]


def fastest(content: Content, role: str) -> Content | None:
    """The fastest right answer of AIR ("air") or of another granular layer ("baseline")."""
    candidates = [result for result in timed(content) if result["role"] == role]
    return min(candidates, key=typical, default=None)


def print_case(console: Console, content: Content) -> None:
    """The table of a case or of training steps, then why some contenders have no time."""
    console.print(f"\n{content['case']}: {content['shape_text']}", style="bold", highlight=False)
    is_step, table = content["phase"] == "step", Table(box=SIMPLE)
    table.add_column("", no_wrap=True)
    for heading in STEP_HEADINGS if is_step else HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in sorted(timed(content), key=typical):
        name = result["name"] + (", CUDA graph" if result["captured"] and not is_step else "")
        table.add_row(name, *(_step_cells(result) if is_step else _cells(result)))
    console.print(table)
    if not is_step:
        console.print(f"ms are medians of n; {LEGEND}", style="dim", highlight=False)
    for result in content["results"]:
        if result["reason"]:
            style = "red" if result["status"] in ("wrong", "failed") else "yellow"
            text = f"{result['name']}: {summary(result)}"
            console.print(text, style=style, markup=False, highlight=False)


def summary(result: Content) -> str:
    """The times in a few words, or why there are none."""
    if result["status"] == "out of memory":
        return result["reason"]
    if result["status"] != "timed":
        return f"{result['status']}: {result['reason']}"
    samples = {"forward": result["forward_ms"], "in all": result["total_ms"]}
    parts = [f"{what} {median(laps):.3g} ms" for what, laps in samples.items() if laps]
    return ", ".join([*parts, f"{_peak(result)} GiB"])


def _step_cells(result: Content) -> list[str]:
    speed, middle = median(result["work"]["tokens_per_second"]), result["median"]
    parts = ["-"] * 3  # a captured step is one piece
    if not result["captured"]:
        parts = [f"{ms:.2f}" for ms in (middle["forward_ms"], *result["apart_median_ms"].values())]
    times = f"{speed:,.0f}", f"{middle['total_ms']:.2f}", *parts
    return [*times, _peak(result), str(len(result["total_ms"]))]


def _cells(result: Content) -> list[str]:
    part = "total" if result["total_ms"] else "forward"  # decoding has no backward
    samples, work = result[f"{part}_ms"], result["work"]
    seconds = median(samples) / 1e3
    flops = [
        work[column]["forward"] + (work[column]["backward"] if part == "total" else 0)
        for column in ("algorithmic", "executed")
    ]
    return [
        f"{result['median']['forward_ms']:.3f}",
        f"{median(samples):.3f}" if part == "total" else "-",
        f"{min(samples):.3g}-{max(samples):.3g}",
        _peak(result),
        *(f"{count / seconds / 1e12:.3g}" for count in flops),
        f"{work[f'{part}_floor_ms'] / median(samples):.1%}",
        f"{result['check']['worst_share']:.2f}",
        str(len(samples)),
    ]


def _peak(result: Content) -> str:
    peak = result["peak_bytes"]
    return "-" if peak is None else f"{peak / GIB:.2f}"


def closing_lines(content: Content) -> list[str]:
    """The main results of a case: AIR's other costs, and its ratio to the fastest baseline."""
    ours, other = fastest(content, "air"), fastest(content, "baseline")
    if ours is None:
        return []
    who = f"{content['case']}: {ours['name']}"
    lines = [f"{who}, {name}: {value:.3g} ms" for name, value in ours["apart_median_ms"].items()]
    if other is not None:
        ratio = typical(other) / typical(ours)
        lines.append(
            f"{who}, {typical(ours):.3g} ms, is {ratio:.3g} times as fast as the fastest granular "
            f"baseline, {other['name']}, {typical(other):.3g} ms"
        )
    return lines
