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

from airmoe.experiments.bench.page import cpu_block, draw_bars, gpu_block
from airmoe.experiments.bench.report import timed
from airmoe.experiments.report.rendering import with_part

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU_RESULTS = RESULTS / "paper.json"
FIGURE = ROOT / "docs" / "figures" / "cells.svg"
PAGE = ROOT / "benchmarks" / "README.md"
CELL_COLOURS = ("#3b6fb6", "#d0803c", "#4c9a6a")
STEPS = (
    "In every cell, as dense products:\n1  scores = H W[list]ᵀ",
    "2  keep the K best of each row",
    "3  out = (act(H U[list]ᵀ) · gates) V[list]",
)
DARK, GREY = "#222222", "#d9dde3"

Report = dict[str, Any]


def load(file: Path = GPU_RESULTS) -> Report | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def digest(report: Report | None) -> str:
    """Ties a figure to the results it was drawn from."""
    if report is None:
        return "no results"
    content = json.dumps(report["results"], sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def page() -> str:
    """The page with results, as it should read."""
    text = PAGE.read_text(encoding="utf-8")
    text = with_part(PAGE.name, text, "results", cpu_block(RESULTS))
    return with_part(PAGE.name, text, "gpu", gpu_block(RESULTS))


def draw(report: Report | None, path: Path) -> None:
    """The idea of cells; beside it, once measured, what it brings."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "airmoe", "font.size": 9, "text.color": DARK})
    if report is not None and timed(report):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10.5, 3.3), width_ratios=(2.1, 1.6), layout="constrained"
        )
        device, tokens = report["device"]["name"], report["shape"]["num_tokens"]
        title = f"forward + backward, {tokens:,} tokens,\none {device}, log scale"
        draw_bars(right, report, title)
    else:
        figure, left = plt.subplots(figsize=(6.5, 3.3), layout="constrained")
    _draw_cells(left)
    metadata = {"Date": None, "Description": f"drawn from: {digest(report)}"}
    figure.savefig(path, metadata=metadata if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


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
    report = load()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(report, FIGURE)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    print(f"{FIGURE.relative_to(ROOT)}: {digest(report)}")


if __name__ == "__main__":
    main()
