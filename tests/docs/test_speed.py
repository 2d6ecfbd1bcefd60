"""The speed tables and the figure come from the benchmark's stored results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from airmoe.experiments.bench.measure import Result
from airmoe.experiments.bench.page import cpu_block, gpu_block
from tests.docs.common import load_script

draw_speed = load_script("docs/draw_speed.py")


def test_tables_are_what_the_script_makes() -> None:
    found = draw_speed.PAGE.read_text(encoding="utf-8")
    assert draw_speed.page() == found, "run docs/draw_speed.py"


def test_figure_is_drawn_from_these_results() -> None:
    text = draw_speed.FIGURE.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    drawn = re.search(r"drawn from: (.*?)<", text)
    assert drawn and drawn[1] == draw_speed.digest(draw_speed.load()), (
        "run: python docs/draw_speed.py"
    )


def made_up_gpu_report() -> dict[str, Any]:
    """The layout of benchmarks/results/paper.json."""

    def result(key: str, name: str, role: str, ms: float) -> dict[str, Any]:
        return {
            "key": key, "name": name, "role": role, "status": "timed", "backend": "triton",
            "peak_bytes": int(ms * 2**30), "median": {"forward_ms": ms / 3, "total_ms": ms},
            "apart_median_ms": {"refresh (all)": 1.5, "launched one by one": 9.0},
            "captured": key != "exact", "parts": 2 if key == "peer" else 1,
        }  # fmt: skip

    results = [
        result("air-triton", "AIR Triton", "air", 8.0),
        result("coarse", "coarse", "coarse", 3.0),
        result("exact", "exact", "baseline", 96.0),
        result("peer", "PEER", "baseline", 48.0),
    ]
    return {
        "device": {"name": "a GPU"},
        "shape": {"num_tokens": 65536},
        "shape_text": "T = 65,536",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "results": [*results, {"key": "listing", "status": "wrong"}],
    }


def made_up_steps(*ways: tuple[str, str, float]) -> dict[str, Any]:
    return {
        "shape": {"size": "small"},
        "shape_text": "small, 64 x 256 tokens",
        "results": [
            {
                "key": key, "name": key, "role": role, "status": "timed", "total_ms": [ms],
                "work": {"tokens_per_second": [1000 / ms]},
            }
            for key, role, ms in ways
        ],
    }  # fmt: skip


def write(folder: Path, name: str, report: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")


def test_gpu_block_says_what_the_mixture_takes_of_a_step(tmp_path: Path) -> None:
    write(tmp_path, "paper", made_up_gpu_report())
    eager, graph = ("eager", "air", 50.0), ("compiled-graph", "air", 20.0)
    dense = ("dense", "dense", 15.0)
    for ways, end in (
        ((eager, graph, dense), "takes 20.0 ms, 5.0 of them (25 %) more"),
        ((eager, graph), "tokens per second: compiled-graph, 50; eager, 20."),
    ):
        write(tmp_path, "step-text", made_up_steps(*ways))
        found = gpu_block(tmp_path)
        assert end in found and "dense" not in found


def test_gpu_block_names_the_fastest_baseline(tmp_path: Path) -> None:
    assert "Not measured yet" in gpu_block(tmp_path)
    report = made_up_gpu_report()
    write(tmp_path, "paper", report)
    write(tmp_path, "paper-16k", report)
    report["results"] = report["results"][:1]
    write(tmp_path, "decode-8", report)
    write(tmp_path / "broken", "paper", report)
    assert "Not measured yet" in gpu_block(tmp_path / "broken"), "no baseline has a time"
    block = gpu_block(tmp_path)
    assert "| PEER, in 2 parts | 16.0 | 48.0 | 9.00 | 6.00 | 48.0 |" in block
    assert "| coarse | 1.00 | 3.00 | 9.00 | 0.38 | 3.0 |" in block
    assert "| exact | 32.0 | 96.0 | 96.0 | 12.0 | 96.0 |" in block, "without a graph: its own time"
    assert "The fastest granular baseline is PEER: AIR takes 1/6.00 of its time." in block
    assert "refresh (all) 1.50 ms." in block
    assert "| T = 16,384 | 8.00 | 9.00 | 1.50 | PEER | 48.0 | 9.00 | 6.00 |" in block
    assert "(forward) | 8.00 | 9.00 | 1.50 | not measured | | | |" in block


def test_cpu_block_states_ratios_and_what_is_missing(tmp_path: Path) -> None:
    assert "Not measured yet" in cpu_block(tmp_path)

    def results(*seconds: tuple[str, str, float]) -> dict[str, Any]:
        made = [
            Result(
                key, name, "air", forward_ms=[250 * s], total_ms=[1e3 * s],
                peak_bytes=int(s * 2**30), apart_ms={"refresh (all)": [2e3 * s]},
            )
            for key, name, s in seconds
        ]  # fmt: skip
        lost = Result("peer-pytorch", "PEER-pytorch", "baseline", "skipped", "not installed")
        return {
            "shape": {"num_experts": 65_536},
            "shape_text": "T = 4,096",
            "device": {"name": "a processor", "threads": 2},
            "versions": {"torch": "2.13.0"},
            "results": [result.as_json() for result in (*made, lost)],
        }

    write(tmp_path, "cpu", results(("air", "AIR", 1.0), ("listing", "paper's listing", 9.0)))
    assert cpu_block(tmp_path).endswith("| PEER-pytorch | skipped | | | |")
    write(tmp_path, "cpu-swiglu", results(("air", "AIR", 2.0), ("listing", "listing", 12.0)))
    write(tmp_path, "cpu-growth", results(("air", "AIR", 1.0), ("air-16-times", "more", 1.25)))
    table = cpu_block(tmp_path)
    assert "2 threads of a processor, torch 2.13.0." in table
    assert "| paper's listing | 9.00 | 9.0 | 9.00 | 9.0 |" in table
    assert "| PEER-pytorch | skipped | | | |" in table
    assert "listing 12.00 s (6.0 times)" in table
    assert "E = 1,048,576: the forward takes 1.25 times as long as with 65,536" in table
    assert "takes 2.50 s against 2.00 s." in table


@pytest.mark.parametrize("measured", [True, False])
def test_figure_can_be_drawn(measured: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = made_up_gpu_report() if measured else None
    draw_speed.draw(report, tmp_path / "cells.svg")
    text = (tmp_path / "cells.svg").read_text(encoding="utf-8")
    assert draw_speed.digest(report) in text
