"""The stored results as Markdown and as a figure: what benchmarks/README.md shows."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.bench.report import GIB, Content, fastest, timed, typical
from airmoe.files import read_json, write_bytes

AIR = "air-triton"
DARK, OURS, NAMED, OTHER = "#222222", "#3b6fb6", "#8c96a3", "#d3d8df"
NOT_YET = "Not measured yet: `{}`, then `python docs/draw_speed.py`."
OTHERS = {
    "paper-16k": "T = 16,384",
    "paper-768": "D = 768",
    "paper-g256": "G = 256",
    "paper-zipf": "cells of very unequal size",
    "paper-captured": "hidden states of a trained model",
    "scaling-1048576": "E = 1,048,576",
    "decode-8": "decoding 8 tokens, D = 1,024, E = 1,048,576 (forward)",
}


def gpu_block(results: Path) -> str:
    """The table of the paper's shape, the lines of the other cases, and the training step."""
    paper = _read(results, "paper")
    if paper is None or not timed(paper, AIR) or fastest(paper, "baseline") is None:
        return NOT_YET.format("airmoe bench")
    parts = list(_paper(paper))
    read = ((what, _read(results, name)) for name, what in OTHERS.items())
    lines = [_line(what, content) for what, content in read if content and timed(content, AIR)]
    if lines:
        head = "otherwise|AIR, ms|one by one|refresh"
        head += "|fastest granular baseline|ms|one by one|times AIR"
        parts.append(_table(head, "---|---:|---:|---:|---|---:|---:|---:", lines))
    if step := _read(results, "step-text"):
        parts.append(_step(step))
    return "\n\n".join(parts)


def _paper(paper: Content) -> Iterator[str]:
    """How it was measured, the table, and what it says."""
    versions, (air,), rival = paper["versions"], timed(paper, AIR), fastest(paper, "baseline")
    assert rival is not None
    yield (
        f"One layer on one {paper['device']['name']}: {paper['shape_text']}, torch "
        f"{versions['torch']}, triton {versions['triton']}. Medians of one run, each layer as "
        "a CUDA graph; beside it what it takes launched one by one, where a small or busy host "
        "costs more. Each is held against its definition in float64 before it gets a time. Repeat "
        "with `airmoe bench`."
    )
    rows = [
        [
            result["name"] + (f", in {result['parts']} parts" if result["parts"] > 1 else ""),
            number(result["median"]["forward_ms"]),
            number(typical(result)),
            _one_by_one(result),
            number(typical(result) / typical(air)),
            f"{result['peak_bytes'] / GIB:.1f}",
        ]
        for result in sorted(timed(paper), key=typical)
    ]
    head = "layer|forward, ms|forward + backward, ms|one by one|times AIR|peak memory, GiB"
    yield _table(head, "---|---:|---:|---:|---:|---:", rows)
    apart = air["apart_median_ms"]
    once = {name: ms for name, ms in apart.items() if name.startswith(("refresh", "casts"))}
    listed = ", ".join(f"{name} {number(ms)} ms" for name, ms in once.items())
    yield (
        f"The fastest granular baseline is {rival['name']}: AIR takes 1/"
        f"{number(typical(rival) / typical(air))} of its time. Once per optimizer step and not in "
        f"these times: {listed}."
    )


def _line(what: str, content: Content) -> list[str]:
    """Another case in a row: AIR and the fastest granular baseline."""
    (air,), rival = timed(content, AIR), fastest(content, "baseline")
    row = [what, number(typical(air)), _one_by_one(air), _shown(air, "refresh")]
    if rival is None:
        return [*row, "not measured", "", "", ""]
    ratio = typical(rival) / typical(air)
    return [*row, rival["name"], number(typical(rival)), _one_by_one(rival), number(ratio)]


def _step(content: Content) -> str:
    """Tokens per second, and what a step saves if a plain layer takes the mixture's place."""

    def speed(way: Content) -> float:
        return median(way["work"]["tokens_per_second"])

    ways = sorted((way for way in timed(content) if way["role"] == "air"), key=speed, reverse=True)
    listed = "; ".join(f"{way['name']}, {speed(way):,.0f}" for way in ways)
    text = (
        f"Whole training steps of `{content['shape']['size']}` "
        f"({content['shape_text'].split(', ', 1)[1]}), tokens per second: {listed}."
    )
    steps = [timed(content, key) for key in ("compiled-graph", "dense")]
    if not all(steps):
        return text
    with_experts, without = (median(step[0]["total_ms"]) for step in steps)
    return (
        f"{text} A captured step takes {with_experts:.1f} ms, {with_experts - without:.1f} of them "
        f"({100 * (1 - without / with_experts):.0f} %) more than with a plain layer in the place "
        "of routing and experts."
    )


def cpu_block(results: Path) -> str:
    """The contenders on a CPU, and in a sentence each SwiGLU and growth."""
    cpu = _read(results, "cpu")
    if cpu is None or not timed(cpu, "air"):
        return NOT_YET.format("make bench")
    (air,), device, rows = timed(cpu, "air"), cpu["device"], []
    for result in cpu["results"]:
        if result["status"] != "timed":
            rows.append([result["name"], result["status"], "", "", ""])
            continue
        ms, memory = typical(result), result["peak_bytes"]
        times = f"{ms / 1e3:.2f}", f"{ms / typical(air):.1f}"
        sizes = f"{memory / GIB:.2f}", f"{memory / air['peak_bytes']:.1f}"
        rows.append([result["name"], *times, *sizes])
    heading = (
        f"{cpu['shape_text']}, forward + backward, {device['threads']} threads of "
        f"{device['name']}, torch {cpu['versions']['torch']}. Medians of one run, contenders in "
        "turns. Repeat with `make bench`."
    )
    head = "layer, two-matrix GELU experts|seconds|times AIR|peak memory, GiB|times AIR"
    table = _table(head, "---|---:|---:|---:|---:", rows)
    return "\n\n".join([heading, table, " ".join(_cpu_notes(results))]).rstrip()


def _cpu_notes(results: Path) -> Iterator[str]:
    """SwiGLU and growth, in a sentence each, where they were measured."""
    swiglu, growth = _read(results, "cpu-swiglu"), _read(results, "cpu-growth")
    if swiglu is not None and len(timed(swiglu)) == 2:
        ours, theirs = (typical(result) / 1e3 for result in timed(swiglu))
        yield (
            f"With SwiGLU experts AIR takes {ours:.2f} s, the paper's listing {theirs:.2f} s "
            f"({theirs / ours:.1f} times)."
        )
    if growth is not None and len(timed(growth)) == 2:
        few, many = timed(growth)
        ratio = many["median"]["forward_ms"] / few["median"]["forward_ms"]
        more, less = (1e-3 * (_apart(result, "refresh") or 0) for result in (many, few))
        experts = growth["shape"]["num_experts"]
        yield (
            f"E = {16 * experts:,}: the forward takes {ratio:.2f} times as long as with "
            f"{experts:,}; the shortlist refresh, once per optimizer step, takes "
            f"{more:.2f} s against {less:.2f} s."
        )


def _read(results: Path, name: str) -> Content | None:
    file = results / f"{name}.json"
    return read_json(file) if file.is_file() else None


def _table(head: str, rule: str, rows: Iterable[list[str]]) -> str:
    """Markdown, of a head and a rule without their outer bars."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows]
    return "\n".join([f"| {head.replace('|', ' | ')} |", f"|{rule}|", *lines])


def _one_by_one(result: Content) -> str:
    """Its time without a graph; where it has no graph at all, that is its time."""
    return _shown(result, "launched") if result["captured"] else number(typical(result))


def _shown(result: Content, what: str) -> str:
    found = _apart(result, what)
    return "-" if found is None else number(found)


def _apart(result: Content, what: str) -> float | None:
    """Milliseconds of something that is measured apart, by how its name begins."""
    times = result["apart_median_ms"].items()
    return next((ms for name, ms in times if name.startswith(what)), None)


def number(value: float) -> str:
    """Three digits, thousands apart, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


# -- figure --------------------------------------------------------------------------------------


def draw(results: Content, path: Path) -> None:
    """Bars of forward + backward by contender, and in words how AIR compares with the fastest."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(
            "bench.figure", str(path), "needs matplotlib", "Run: pip install 'airmoe[plot]'"
        ) from None
    if not timed(results):
        rule = f"nothing of {results['case']} has a time"
        raise ConfigError("bench.figure", str(path), rule, "Measure first.")
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "airmoe", "font.size": 9, "text.color": DARK})
    size = (7.2, 0.9 + 0.3 * len(timed(results)))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    draw_bars(axes, results, _title(results))
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, content = path.suffix.lstrip(".") or "png", io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(content, format=kind, metadata=metadata, dpi=130)
    plt.close(figure)
    write_bytes(path, content.getvalue())


def draw_bars(axes: Any, results: Content, title: str) -> None:
    """Fastest first; AIR at its best and the fastest baseline stand out."""
    bars = sorted(timed(results), key=typical)
    values = [typical(bar) for bar in bars]
    ours, rival = fastest(results, "air"), fastest(results, "baseline")
    colours = [OURS if bar is ours else NAMED if bar is rival else OTHER for bar in bars]
    peaks = [bar["peak_bytes"] for bar in bars]
    memory = ["" if peak is None else f", {peak / GIB:.3g} GiB" for peak in peaks]
    labels = [f"{number(ms)} ms{size}" for ms, size in zip(values, memory, strict=True)]
    drawn = axes.barh([bar["name"] for bar in bars], values, 0.65, color=colours)
    axes.bar_label(drawn, labels, padding=4)
    axes.set_xscale("log")
    axes.set_xlim(0.5 * min(values), 30 * max(values))
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)


def _title(results: Content) -> str:
    what = "forward" if results["phase"] == "decoding" else "forward + backward"
    title = f"{what} of one layer, log scale, {results['device']['name']}\n{results['shape_text']}"
    ours, rival = fastest(results, "air"), fastest(results, "baseline")
    if ours is None or rival is None:
        return title
    ratio = typical(rival) / typical(ours)
    return (
        f"{title}\n{ours['name']} is {ratio:.3g} times as fast as the fastest granular baseline, "
        f"{rival['name']}"
    )
