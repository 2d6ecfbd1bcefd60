"""The stored results as a block of Markdown: what benchmarks/README.md shows."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from airmoe.experiments.bench.report import GIB, Content, fastest_baseline, timed, typical
from airmoe.files import read_json

AIR = "air-triton"
OTHERS = {
    "paper-16k": "T = 16,384",
    "paper-768": "D = 768",
    "paper-g256": "G = 256",
    "paper-zipf": "cells of very unequal size",
    "paper-captured": "hidden states of a trained model",
    "scaling-1048576": "E = 1,048,576",
    "decode-8": "decoding 8 tokens, D = 1,024, E = 1,048,576 (forward)",
}


def block(results: Path) -> str:
    """The table of the paper's shape, the lines of the other cases, and the training step."""
    paper = _read(results, "paper")
    if paper is None or not timed(paper, AIR) or fastest_baseline(paper) is None:
        return "Not measured yet: `airmoe bench`, then `python docs/draw_speed.py`."
    parts = [_heading(paper), _table(paper), _against_fastest(paper)]
    lines = [line for name, what in OTHERS.items() if (line := _line(results, name, what))]
    if lines:
        head = [
            "| otherwise | AIR, ms | one by one | refresh | fastest granular baseline | ms "
            "| one by one | times AIR |",
            "|---|---:|---:|---:|---|---:|---:|---:|",
        ]
        parts.append("\n".join([*head, *lines]))
    step = _read(results, "step-text")
    if step is not None:
        parts.append(_step(step))
    return "\n\n".join(parts)


def _read(results: Path, name: str) -> Content | None:
    file = results / f"{name}.json"
    return read_json(file) if file.is_file() else None


def _heading(paper: Content) -> str:
    versions = paper["versions"]
    return (
        f"One layer on one {paper['device']['name']}: {paper['shape_text']}, torch "
        f"{versions['torch']}, triton {versions['triton']}. Medians of one run, each layer as "
        "a CUDA graph; beside it what it takes launched one by one, where a small or busy host "
        "costs more. Each is held against its definition in float64 before it gets a time. Repeat "
        "with `airmoe bench`."
    )


def _table(paper: Content) -> str:
    rows = [
        "| layer | forward, ms | forward + backward, ms | one by one | times AIR "
        "| peak memory, GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    (air,) = timed(paper, AIR)
    for result in sorted(timed(paper), key=typical):
        middle = result["median"]
        rows.append(
            f"| {_name(result)} | {number(middle['forward_ms'])} | {number(typical(result))} "
            f"| {_one_by_one(result)} | {number(typical(result) / typical(air))} "
            f"| {result['peak_bytes'] / GIB:.1f} |"
        )
    return "\n".join(rows)


def _against_fastest(paper: Content) -> str:
    (air,) = timed(paper, AIR)
    rival = fastest_baseline(paper)
    assert rival is not None
    apart = air["apart_median_ms"]
    once = {name: ms for name, ms in apart.items() if name.startswith(("refresh", "casts"))}
    listed = ", ".join(f"{name} {number(ms)} ms" for name, ms in once.items())
    return (
        f"The fastest granular baseline is {rival['name']}: AIR takes 1/"
        f"{number(typical(rival) / typical(air))} of its time. Once per optimizer step and not in "
        f"these times: {listed}."
    )


def _line(results: Path, name: str, what: str) -> str | None:
    content = _read(results, name)
    if content is None or not timed(content, AIR):
        return None
    (air,) = timed(content, AIR)
    rival = fastest_baseline(content)
    ours = f"{number(typical(air))} | {_one_by_one(air)} | {_apart(air, 'refresh')}"
    if rival is None:
        return f"| {what} | {ours} | not measured | | | |"
    theirs, ratio = number(typical(rival)), number(typical(rival) / typical(air))
    return f"| {what} | {ours} | {rival['name']} | {theirs} | {_one_by_one(rival)} | {ratio} |"


def _name(result: Content) -> str:
    """With what made it smaller: some need the batch in parts."""
    parts = result["parts"]
    return result["name"] if parts == 1 else f"{result['name']}, in {parts} parts"


def _one_by_one(result: Content) -> str:
    """Its time without a graph; where it has no graph at all, that is its time."""
    return _apart(result, "launched") if result["captured"] else number(typical(result))


def _apart(result: Content, what: str) -> str:
    found = [ms for name, ms in result["apart_median_ms"].items() if name.startswith(what)]
    return number(found[0]) if found else "-"


def _step(content: Content) -> str:
    ways = sorted((way for way in timed(content) if way["role"] == "air"), key=_speed, reverse=True)
    speeds = "; ".join(f"{way['name']}, {_speed(way):,.0f}" for way in ways)
    return (
        f"Whole training steps of `{content['shape']['size']}` "
        f"({content['shape_text'].split(', ', 1)[1]}), tokens per second: {speeds}."
        f"{_share_of_mixture(content)}"
    )


def _share_of_mixture(content: Content) -> str:
    """What a captured step saves, where a plain layer takes the mixture's place."""
    steps = [timed(content, key) for key in ("compiled-graph", "dense")]
    if not all(steps):
        return ""
    with_experts, without = (median(step[0]["total_ms"]) for step in steps)
    return (
        f" A captured step takes {with_experts:.1f} ms, {with_experts - without:.1f} of them "
        f"({100 * (1 - without / with_experts):.0f} %) more than with a plain layer in the place "
        "of routing and experts."
    )


def _speed(result: dict[str, Any]) -> float:
    return median(result["work"]["tokens_per_second"])


def number(value: float) -> str:
    """Three digits, thousands apart, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
