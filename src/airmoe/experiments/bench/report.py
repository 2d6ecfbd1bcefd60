"""From results, as they stand in the JSON files, to tables and the lines at the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

GIB = 2**30
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
    return result["median"].get("total_ms", result["median"]["forward_ms"])


def fastest(content: Content, role: str) -> Content | None:
    """The fastest right answer of AIR ("air") or of another granular layer ("baseline")."""
    candidates = [result for result in timed(content) if result["role"] == role]
    return min(candidates, key=typical, default=None)


def print_case(console: Console, content: Content) -> None:
    """The table of a case, fastest first, then who has no time and why."""
    headings = ["forward ms", "total ms", "min-max", "peak GiB", "TFLOP/s", "executed"]
    rows = [(_label(result), _cells(result)) for result in sorted(timed(content), key=typical)]
    _print_table(console, content, [*headings, "of floor", "error", "n"], rows)
    console.print(f"ms are medians of n; {LEGEND}", style="dim", highlight=False)
    for result in content["results"]:
        if remark := remarks(result["status"], result["reason"]):
            style = "red" if result["status"] in ("wrong", "failed") else "yellow"
            text = f"{result['name']}: {remark}"
            console.print(text, style=style, markup=False, highlight=False)


def print_step(console: Console, content: Content) -> None:
    rows = []
    for result in content["results"]:
        if result["status"] != "timed":
            rows.append((result["name"], [f"{result['status']}: {result['reason']}"]))
            continue
        speed, middle = median(result["work"]["tokens_per_second"]), result["median"]
        parts = ["-"] * 3  # a captured step is one piece
        if not result["captured"]:
            apart = result["apart_median_ms"].values()
            parts = [f"{ms:.2f}" for ms in (middle["forward_ms"], *apart)]
        cells = [f"{speed:,.0f}", f"{middle['total_ms']:.2f}", *parts, _peak(result)]
        rows.append((result["name"], [*cells, str(len(result["total_ms"]))]))
    headings = ["tokens/s", "step ms", "forward", "backward", "optimizer", "peak GiB", "n"]
    _print_table(console, content, headings, rows)


def _print_table(
    console: Console, content: Content, headings: list[str], rows: list[tuple[str, list[str]]]
) -> None:
    console.print(f"\n{content['case']}: {content['shape_text']}", style="bold", highlight=False)
    table = Table(box=SIMPLE)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=len(headings) > 7)
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)


def remarks(status: str, reason: str) -> str:
    """In words what happened, where the reason does not say so itself."""
    return reason if status in ("timed", "out of memory") else f"{status}: {reason}"


def _label(result: Content) -> str:
    notes = [f"in {result['parts']} parts"] if result["parts"] > 1 else []
    notes += ["CUDA graph"] if result["captured"] else []
    return ", ".join([result["name"], *notes])


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


def closing_lines(contents: Sequence[Content]) -> list[str]:
    """What to remember of all cases of a run."""
    lines, growth = [], {}
    for content in contents:
        if content["phase"] != "step":
            lines += _case_lines(content)
        if content["case"].startswith("scaling-"):  # what more experts do to each contender
            for result in timed(content):
                growth.setdefault(result["name"], []).append(
                    f"E = {content['shape']['num_experts']:,}: "
                    f"{result['median']['forward_ms']:.3g} / {typical(result):.3g}"
                )
    what = "forward / forward + backward, ms"
    return lines + [f"{name}, {what}: {'; '.join(steps)}" for name, steps in growth.items()]


def _case_lines(content: Content) -> list[str]:
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
