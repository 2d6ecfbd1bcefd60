"""From results, as they stand in the JSON files, to tables and the lines at the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

GIB = 2**30
LEDGERS = ("algorithmic", "executed")
HEADINGS = (
    *("forward ms", "total ms", "min-max", "peak GiB", "TFLOP/s", "executed"),
    *("of floor", "error", "n"),
)
LEGEND = (
    "total is forward + backward; TFLOP/s counts K experts, executed what was computed; "
    "of floor is the least possible time over the measured; error is a share of the allowed one"
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
    return result["median"].get("total_ms", result["median"]["forward_ms"])


def fastest_baseline(content: Content) -> Content | None:
    """The fastest right answer of a granular layer that is not AIR."""
    baselines = [result for result in timed(content) if result["role"] == "baseline"]
    return min(baselines, key=typical, default=None)


def fastest_air(content: Content) -> Content | None:
    ours = [result for result in timed(content) if result["role"] == "air"]
    return min(ours, key=typical, default=None)


def remarks(status: str, reason: str) -> str:
    """In words what happened, where the reason does not say so itself."""
    return reason if status in ("timed", "out of memory") else f"{status}: {reason}"


def print_case(console: Console, content: Content) -> None:
    """The table of a case, fastest first, then who has no time and why."""
    decoding = content["phase"] == "decoding"
    console.print(f"\n{content['case']}: {content['shape_text']}", style="bold", highlight=False)
    table = Table(box=SIMPLE)
    table.add_column("layer", no_wrap=True)
    for heading in HEADINGS:
        if not (decoding and heading == "total ms"):
            table.add_column(heading, justify="right", no_wrap=True)
    for result in sorted(timed(content), key=typical):
        table.add_row(_label(result), *_cells(result, decoding))
    console.print(table)
    console.print(f"ms are medians of n; {LEGEND}", style="dim", highlight=False)
    for result in content["results"]:
        if remark := remarks(result["status"], result["reason"]):
            style = "red" if result["status"] in ("wrong", "failed") else "yellow"
            text = f"{result['name']}: {remark}"
            console.print(text, style=style, markup=False, highlight=False)


def _label(result: Content) -> str:
    notes = [f"in {result['parts']} parts"] if result["parts"] > 1 else []
    notes += ["CUDA graph"] if result["captured"] else []
    return ", ".join([result["name"], *notes])


def _cells(result: Content, decoding: bool) -> list[str]:
    part = "forward" if decoding else "total"
    samples, work = result[f"{part}_ms"], result["work"]
    seconds = median(samples) / 1e3
    flops = [
        work[kind]["forward"] + (0 if decoding else work[kind]["backward"]) for kind in LEDGERS
    ]
    peak = result["peak_bytes"]
    return [
        f"{result['median']['forward_ms']:.3f}",
        *([] if decoding else [f"{median(samples):.3f}"]),
        f"{min(samples):.3g}-{max(samples):.3g}",
        "-" if peak is None else f"{peak / GIB:.2f}",
        *(f"{count / seconds / 1e12:.3g}" for count in flops),
        f"{work[f'{part}_floor_ms'] / median(samples):.1%}",
        f"{result['check']['worst_share']:.2f}",
        str(len(samples)),
    ]


def print_step(console: Console, content: Content) -> None:
    console.print(f"\n{content['case']}: {content['shape_text']}", style="bold", highlight=False)
    table = Table(box=SIMPLE)
    table.add_column("way", no_wrap=True)
    for heading in ("tokens/s", "step ms", "forward", "backward", "optimizer", "peak GiB", "n"):
        table.add_column(heading, justify="right")
    for result in content["results"]:
        if result["status"] != "timed":
            table.add_row(result["name"], f"{result['status']}: {result['reason']}")
            continue
        middle, peak = result["median"], result["peak_bytes"]
        table.add_row(
            result["name"],
            f"{median(result['work']['tokens_per_second']):,.0f}",
            f"{middle['total_ms']:.2f}",
            *_parts_of_step(result),
            "-" if peak is None else f"{peak / GIB:.2f}",
            str(len(result["total_ms"])),
        )
    console.print(table)


def _parts_of_step(result: Content) -> list[str]:
    """Forward, backward, optimizer; a captured step is one piece."""
    if result["captured"]:
        return ["-"] * 3
    times = [result["median"]["forward_ms"], *result["apart_median_ms"].values()]
    return [f"{ms:.2f}" for ms in times]


def closing_lines(contents: Sequence[Content]) -> list[str]:
    """What to remember of all cases of a run."""
    return [line for content in contents for line in _case_lines(content)] + _growth_lines(contents)


def _case_lines(content: Content) -> list[str]:
    if content["phase"] == "step":
        return []
    ours, other = fastest_air(content), fastest_baseline(content)
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


def _growth_lines(contents: Sequence[Content]) -> list[str]:
    """What more experts do to each contender."""
    scaling = [content for content in contents if content["case"].startswith("scaling-")]
    by_name: dict[str, list[str]] = {}
    for content in scaling:
        for result in timed(content):
            by_name.setdefault(result["name"], []).append(
                f"E = {content['shape']['num_experts']:,}: "
                f"{result['median']['forward_ms']:.3g} / {typical(result):.3g}"
            )
    return [
        f"{name}, forward / forward + backward, ms: {'; '.join(steps)}"
        for name, steps in by_name.items()
    ]
