"""The speed tables and the figure come from the benchmark's stored results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from airmoe.experiments.bench.results import Result
from tests.docs.common import load_script

draw_speed = load_script("docs/draw_speed.py")


def test_tables_are_what_the_script_makes() -> None:
    found = draw_speed.PAGE.read_text(encoding="utf-8")
    assert draw_speed.page() == found, "run docs/draw_speed.py"
    found = draw_speed.README.read_text(encoding="utf-8")
    assert draw_speed.readme() == found, "run docs/draw_speed.py"


def test_figure_is_drawn_from_these_results(tmp_path: Path) -> None:
    digest = draw_speed.digest(draw_speed.load("paper"))
    text = draw_speed.FIGURE.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    drawn = re.search(r"drawn from: (.*?)<", text)
    assert drawn and drawn[1] == digest, "run: python docs/draw_speed.py"
    pytest.importorskip("matplotlib")
    draw_speed.draw(draw_speed.load("paper"), tmp_path / "cells.svg")
    assert digest in (tmp_path / "cells.svg").read_text(encoding="utf-8")


def stored(*results: Result) -> dict[str, Any]:
    """The layout of a file in benchmarks/results."""
    shown = [one.as_json() for one in results]
    return {
        "device": {"name": "a device", "threads": 2},
        "shape": {"num_tokens": 65536, "num_experts": 65536, "size": "small"}
        | {"num_sequences": 64, "block_size": 256},
        "shape_text": "T = 65,536, K = 512",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "results": shown,
        "by": {one["key"]: one for one in shown},
    }


def result(key: str, role: str, ms: float, **more: Any) -> Result:
    made = Result(key, key, role, forward_ms=[ms / 4], total_ms=[ms], **more)
    made.peak_bytes = int(ms * 2**30)
    made.apart_ms = {"refresh (all)": [1.5], "casts": [0.5], "without CUDA graph": [9.0]}
    made.work = {"tokens_per_second": [1000 / ms]}
    return made


def test_what_the_tables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Result("listing", "listing", "baseline", "out of memory", "out of memory, needs much")
    ours = result("air", "air", 8.0, captured=True)
    paper = stored(
        ours,
        result("coarse", "coarse", 3.0, captured=True),
        result("exact", "baseline", 96.0),
        result("peer", "baseline", 48.0, captured=True),
        lost,
    )
    steps = [("eager", "air", 50.0), ("compiled-graph", "air", 20.0), ("dense", "dense", 15.0)]
    files = {
        "cpu": stored(result("air", "air", 1000.0), lost),
        "cpu-swiglu": stored(result("air", "air", 2000.0), result("listing", "baseline", 12_000.0)),
        "cpu-growth": stored(result("air", "air", 1000.0), result("air-16-times", "air", 1250.0)),
        "step-text": stored(*(result(*step) for step in steps)),
    }
    monkeypatch.setattr(draw_speed, "load", lambda name: files.get(name, paper))
    page = draw_speed.page()
    for part in (
        "| coarse | 0.75 | 3.00 | 9.00 | 0.38 | 3.0 |",
        "| exact | 24.0 | 96.0 | 96.0 | 12.0 | 96.0 |",  # no graph: that is its time
        "| listing | out of memory, needs much | | | | |",
        "The fastest granular baseline is peer: AIR takes 1/6.00 of its time.",
        "the refresh of the shortlists 1.50 ms, casts from float32 0.50 ms.",
        "| T = 16,384 | 8.00 | 9.00 | 1.50 | peer | 48.0 | 9.00 | 6.00 |",
        "tokens per second: compiled-graph, 50; eager, 20. A captured",
        "takes 20.0 ms, 5.0 of them (25 %) more than",
        "2 threads of a device, torch 2.11.0.",
        "| air | 1.00 | 1.0 | 1000.00 | 1.0 |",
        "| listing | out of memory | | | |",
        "the paper's listing 12.00 s (6.0 times)",
        "E = 1,048,576: the forward takes 1.25 times as long as with 65,536",
        "takes 0.00 s against 0.00 s.",
    ):
        assert part in page, part
    readme = draw_speed.readme()
    for row in (
        "AIR | 8.00 | 20.0 | 50",
        "Hierarchical | – | – | –",
        "PEER | 48.0 | – | –",
        "Without routing and experts | – | 15.0 | 67",
    ):
        assert f"| {row} |\n" in readme, row
