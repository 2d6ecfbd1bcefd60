"""The figure of a case, drawn from its JSON file: who takes how long, on a log scale."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.bench.report import fastest_air, fastest_baseline, timed, typical
from airmoe.files import write_bytes

DARK, OURS, NAMED, OTHER = "#222222", "#3b6fb6", "#8c96a3", "#d3d8df"


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of forward + backward by contender, and in words how AIR compares with the fastest."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(
            "bench.figure", str(path), "needs matplotlib", "Run: pip install 'airmoe[plot]'"
        ) from None
    bars = sorted(timed(results), key=typical)
    if not bars:
        raise ConfigError(
            "bench.figure", str(path), f"nothing of {results['case']} has a time", "Measure first."
        )
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "airmoe", "font.size": 9, "text.color": DARK})
    figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.3 * len(bars)), layout="constrained")
    values = [typical(bar) for bar in bars]
    colours = _colours(bars, fastest_air(results), fastest_baseline(results))
    drawn = axes.barh([bar["name"] for bar in bars], values, 0.65, color=colours)
    axes.bar_label(drawn, [_label(bar) for bar in bars], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(0.5 * min(values), 6 * max(values))
    axes.invert_yaxis()
    axes.set_title(_title(results), loc="left", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, content = path.suffix.lstrip(".") or "png", io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(content, format=kind, metadata=metadata, dpi=130)
    plt.close(figure)
    write_bytes(path, content.getvalue())


def _colours(bars: list[dict[str, Any]], *named: dict[str, Any] | None) -> list[str]:
    """The two that are compared stand out: AIR at its best, and the fastest baseline."""
    shades = (OURS, NAMED)
    return [
        next((shade for shade, one in zip(shades, named, strict=True) if bar is one), OTHER)
        for bar in bars
    ]


def _label(bar: dict[str, Any]) -> str:
    peak = bar["peak_bytes"]
    memory = "" if peak is None else f", {peak / 2**30:.3g} GiB"
    return f"{typical(bar):.3g} ms{memory}"


def _title(results: dict[str, Any]) -> str:
    what = "forward" if results["phase"] == "decoding" else "forward + backward"
    lines = [f"{what} of one layer, log scale, {results['device']['name']}", results["shape_text"]]
    ours, rival = fastest_air(results), fastest_baseline(results)
    if ours is not None and rival is not None:
        ratio = typical(rival) / typical(ours)
        lines.append(
            f"{ours['name']} is {ratio:.3g} times as fast as the fastest granular baseline, "
            f"{rival['name']}"
        )
    return "\n".join(lines)
