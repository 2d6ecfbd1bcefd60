"""Benchmark results -> figure and tables of the pages: `python docs/draw_speed.py` (extra `plot`).

Reads what `airmoe bench` and `make bench` wrote to benchmarks/results, and rewrites the tables of
benchmarks/README.md and the README's. Numbers are never typed by hand: a test compares.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

from airmoe.experiments.bench.results import GIB, Content, fastest, timed, typical
from airmoe.experiments.report.rendering import environment, with_part

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "figures" / "cells.svg"
PAGE, README = ROOT / "benchmarks" / "README.md", ROOT / "README.md"
OTHERS = {
    "paper-16k": "T = 16,384",
    "paper-768": "D = 768",
    "paper-g256": "G = 256",
    "paper-zipf": "cells of very unequal size",
    "scaling-1048576": "E = 1,048,576",
    "decode-8": "decoding 8 tokens, D = 1,024, E = 1,048,576 (forward)",
}
CELL_COLOURS = ("#3b6fb6", "#d0803c", "#4c9a6a")
STEPS = (
    "In every cell, as dense products:\n1  scores = H W[list]ᵀ",
    "2  keep the K best of each row",
    "3  out = (act(H U[list]ᵀ) · gates) V[list]",
)
DARK, GREY, OURS, RIVAL, OTHER = "#222222", "#d9dde3", "#3b6fb6", "#8c96a3", "#d3d8df"


def load(name: str) -> Content:
    """Stored results, in their order and `by` key."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content | {"by": {result["key"]: result for result in content["results"]}}


def digest(report: Content) -> str:
    """Ties a figure to the results it was drawn from."""
    content = json.dumps(report["results"], sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def templates() -> Any:
    """The tables, as functions of results."""
    found = environment(ROOT / "docs")
    found.globals.update(
        apart=apart, fastest=fastest, number=number, speed=speed, timed=timed, typical=typical,
        without_graph=without_graph,
    )  # fmt: skip
    return found.get_template("speed.md.j2").module


def readme() -> str:
    """The README, as it should read."""
    table = templates().in_readme(load("paper"), load("step-text"))
    return with_part(README.name, README.read_text(encoding="utf-8"), "speed", table.strip())


def page() -> str:
    """The page with results, as it should read."""
    blocks = templates()
    cpu = blocks.on_cpu(*map(load, ("cpu", "cpu-swiglu", "cpu-growth")))
    others = {what: load(name) for name, what in OTHERS.items()}
    gpu = blocks.on_gpu(load("paper"), others, load("step-text"))
    text = PAGE.read_text(encoding="utf-8")
    text = with_part(PAGE.name, text, "results", cpu.strip())
    return with_part(PAGE.name, text, "gpu", gpu.strip())


def number(value: float) -> str:
    """Three digits, thousands apart, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def speed(way: Content) -> float:
    """Tokens per second of a training step."""
    return median(way["work"]["tokens_per_second"])


def apart(result: Content, what: str) -> float | None:
    """Milliseconds of something that is measured apart, by how its name begins."""
    times = result["apart_median_ms"].items()
    return next((ms for name, ms in times if name.startswith(what)), None)


def without_graph(result: Content) -> str:
    """Its time without CUDA graph, if it is known."""
    found = apart(result, "without") if result["captured"] else typical(result)
    return "-" if found is None else number(found)


def draw(report: Content, path: Path) -> None:
    """The idea of cells; beside it what it brings."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "airmoe", "font.size": 9, "text.color": DARK})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 3.3), width_ratios=(2.1, 1.6), layout="constrained"
    )
    _draw_cells(left)
    _draw_bars(right, report)
    metadata = {"Date": None, "Description": f"drawn from: {digest(report)}"}
    figure.savefig(path, metadata=metadata if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


def _draw_bars(axes: Any, report: Content) -> None:
    """Times, fastest first; AIR and the fastest baseline stand out."""
    bars = sorted(timed(report), key=typical)
    values = [typical(bar) for bar in bars]
    ours, rival = fastest(report, "air"), fastest(report, "baseline")
    colours = [OURS if bar is ours else RIVAL if bar is rival else OTHER for bar in bars]
    labels = [f"{number(typical(bar))} ms, {bar['peak_bytes'] / GIB:.3g} GiB" for bar in bars]
    drawn = axes.barh([bar["name"] for bar in bars], values, 0.65, color=colours)
    axes.bar_label(drawn, labels, padding=4)
    axes.set_xscale("log")
    axes.set_xlim(0.5 * min(values), 30 * max(values))
    axes.invert_yaxis()
    device, tokens = report["device"]["name"], report["shape"]["num_tokens"]
    title = f"forward + backward, {tokens:,} tokens,\none {device}, log scale"
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
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
    report = load("paper")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(report, FIGURE)
    for path, text in ((PAGE, page()), (README, readme())):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    print(f"{FIGURE.relative_to(ROOT)}: {digest(report)}")


if __name__ == "__main__":
    main()
