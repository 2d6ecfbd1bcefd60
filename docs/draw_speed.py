"""Benchmark results -> figure and tables of the pages: `python docs/draw_speed.py` (extra `plot`).

Reads what `airmoe bench` and `make bench` wrote to benchmarks/results, and rewrites the tables of
benchmarks/README.md. Numbers are never typed by hand: a test compares.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from airmoe.experiments.bench.page import block, number
from airmoe.experiments.bench.report import timed, typical
from airmoe.experiments.report.rendering import with_part

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU_RESULTS, GPU_RESULTS = RESULTS / "cpu.json", RESULTS / "paper.json"
FIGURE = ROOT / "docs" / "figures" / "cells.svg"
PAGE = ROOT / "benchmarks" / "README.md"
GIB = 2**30
CELL_COLOURS = ("#3b6fb6", "#d0803c", "#4c9a6a")
STEPS = (
    "In every cell, as dense products:\n1  scores = H W[list]ᵀ",
    "2  keep the K best of each row",
    "3  out = (act(H U[list]ᵀ) · gates) V[list]",
)
DARK, GREY, OTHER = "#222222", "#d9dde3", "#9aa3ad"

Report = dict[str, Any]


def load(file: Path = CPU_RESULTS) -> Report | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def digest(report: Report | None) -> str:
    """Ties a figure to the results it was drawn from."""
    if report is None:
        return "no results"
    content = json.dumps(report["results"], sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


# -- the table ----------------------------------------------------------------------------------


def table(report: Report | None) -> str:
    """Markdown of the CPU's results."""
    if report is None:
        return "Not measured yet: `make bench`, then `python docs/draw_speed.py`."
    shape, groups = report["shape"], report["results"]
    air = groups["gelu"][0]
    lines = [
        f"{shape['num_tokens']:,} tokens, D = {shape['dim']}, E = {shape['num_experts']:,}, "
        f"K = {shape['top_k']}, G = {shape['num_codewords']}, M = {shape['shortlist_size']}, "
        f"float32, forward + backward, {report['threads']} threads of {report['cpu']}, torch "
        f"{report['versions']['torch']}. Medians of one run, contenders in turns. Repeat with "
        "`make bench`.",
        "",
        "| layer, two-matrix GELU experts | seconds | times AIR | peak memory, GiB | times AIR |",
        "|---|---:|---:|---:|---:|",
        *(_line(result, air) for result in groups["gelu"]),
        "",
        *_notes(report),
    ]
    return "\n".join(lines)


def _line(result: Report, air: Report) -> str:
    if result["status"] != "timed":
        return f"| {result['name']} | {result['status']} | | | |"
    seconds, memory = result["median"]["total"], result["peak_bytes"] / GIB
    return (
        f"| {result['name']} | {seconds:.2f} | {seconds / air['median']['total']:.1f} | "
        f"{memory:.2f} | {result['peak_bytes'] / air['peak_bytes']:.1f} |"
    )


def _notes(report: Report) -> list[str]:
    """SwiGLU and growth, in a sentence each, where they were measured."""
    notes = []
    gated_air, gated_listing = report["results"]["swiglu"]
    if gated_air["status"] == gated_listing["status"] == "timed":
        ours, theirs = gated_air["median"]["total"], gated_listing["median"]["total"]
        notes.append(
            f"With SwiGLU experts AIR takes {ours:.2f} s, the paper's listing {theirs:.2f} s "
            f"({theirs / ours:.1f} times)."
        )
    small, large = report["results"]["growth"]
    if small["status"] == large["status"] == "timed":
        ratio = large["median"]["forward"] / small["median"]["forward"]
        notes.append(
            f"{large['name']}: the forward takes {ratio:.2f} times as long as with "
            f"{report['shape']['num_experts']:,}; the shortlist refresh, once per optimizer step, "
            f"takes {large['refresh_seconds']:.2f} s against {small['refresh_seconds']:.2f} s."
        )
    return [" ".join(notes)] if notes else []


def page() -> str:
    """The page with results, as it should read."""
    text = PAGE.read_text(encoding="utf-8")
    text = with_part(PAGE.name, text, "results", table(load()))
    return with_part(PAGE.name, text, "gpu", block(RESULTS))


# -- the figure ---------------------------------------------------------------------------------


def draw(report: Report | None, path: Path) -> None:
    """The idea of cells; beside it, once measured, what it brings."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "airmoe", "font.size": 9, "text.color": DARK})
    bars = [] if report is None else sorted(timed(report), key=typical)
    if bars:
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10.5, 3.3), width_ratios=(2.1, 1.6), layout="constrained"
        )
        _draw_bars(right, bars, report)
    else:
        figure, left = plt.subplots(figsize=(6.5, 3.3), layout="constrained")
    _draw_cells(left)
    metadata = {"Date": None, "Description": f"drawn from: {digest(report)}"}
    figure.savefig(path, metadata=metadata if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


def _draw_bars(axes: Any, bars: list[Report], report: Report) -> None:
    values = [typical(bar) for bar in bars]
    ours = [bar["role"] == "air" and bar["backend"] == "triton" for bar in bars]
    colours = [CELL_COLOURS[0] if own else OTHER for own in ours]
    drawn = axes.barh([bar["name"] for bar in bars], values, color=colours, height=0.6)
    labels = [f"{number(typical(bar))} ms, {number(bar['peak_bytes'] / GIB)} GiB" for bar in bars]
    axes.bar_label(drawn, labels, padding=3, fontsize=8)
    device, tokens = report["device"]["name"], report["shape"]["num_tokens"]
    title = f"forward + backward, {tokens:,} tokens,\none {device}, log scale"
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(0.6 * min(values), 30 * max(values))
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _draw_cells(axes: Any) -> None:
    """Tokens sorted by codeword; a cell is a block of tokens times its own list of experts."""
    from matplotlib.patches import Rectangle

    tokens_per_cell, width, size = (5, 3, 4), 14, 0.42
    picked = _picked(sum(tokens_per_cell), width)
    title = "tokens of one codeword share one shortlist: a cell"
    axes.set_title(title, loc="left", fontsize=9)
    row, top = 0, 0.0
    for cell, (count, colour) in enumerate(zip(tokens_per_cell, CELL_COLOURS, strict=True)):
        for place in range(count):
            y = top + place * size
            axes.add_patch(Rectangle((0, y), 1.9, 0.86 * size, color=colour, alpha=0.55, lw=0))
            for column in range(width):
                chosen = column in picked[row]
                corner = (3.4 + column * size, y)
                shade = colour if chosen else GREY
                axes.add_patch(Rectangle(corner, 0.86 * size, 0.86 * size, color=shade, lw=0))
            row += 1
        middle = top + (count * size) / 2 - 0.03
        axes.annotate(
            "", (3.25, middle), (2.05, middle), arrowprops={"arrowstyle": "->", "color": DARK}
        )
        axes.text(2.65, middle - 0.12, f"list {cell + 1}", ha="center", va="bottom", fontsize=8)
        axes.text(3.4 + width * size + 0.3, middle, STEPS[cell], va="center", fontsize=8.5)
        top += count * size + 0.35
    axes.text(0.95, -0.12, "tokens, sorted", ha="center", va="bottom", fontsize=8)
    axes.text(3.4 + width * size / 2, -0.12, "its M experts", ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.1, 14.6)
    axes.set_ylim(top - 0.2, -0.6)
    axes.set_axis_off()


def _picked(rows: int, width: int) -> list[set[int]]:
    """Which places each row keeps: the same at every drawing."""
    drawn = random.Random(3)
    return [set(drawn.sample(range(width), 4)) for _ in range(rows)]


def main() -> None:
    report = load(GPU_RESULTS)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(report, FIGURE)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    print(f"{FIGURE.relative_to(ROOT)}: {digest(report)}")


if __name__ == "__main__":
    main()
