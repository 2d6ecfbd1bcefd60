"""The examples run from a checkout, and write plain text into a pipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.common import ROOT
from tests.training.command import table_rows


def run(name: str, *arguments: str, cwd: Path = ROOT) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    env.pop("COLUMNS", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert "\x1b" not in done.stdout, "escape codes in a pipe"
    return done.stdout


@pytest.mark.slow
def test_route_by_hand_agrees_with_the_library() -> None:
    output = run("route_by_hand.py")
    steps = [line.split()[0] for line in output.splitlines() if line[0].isdigit()]
    assert steps == ["1", "2", "3", "4", "5"]


@pytest.mark.slow
def test_demo_trains_four_models_and_the_tour_opens_one(tmp_path: Path) -> None:
    output = run("demo.py", "--quick", "--out", "out", cwd=tmp_path)
    out = tmp_path / "out"
    methods = ("air", "exact", "peer", "coarse")
    results = [json.loads((out / method / "result.json").read_text()) for method in methods]
    assert {len(result["log"]) for result in results} == {len(results[0]["log"])}
    table = output.partition("After the same training")[2].partition("perplexity  on")[0]
    numbers = [row[1:] for row in table_rows(table)]
    assert [row[1] for row in numbers] == [f"{r['last']['perplexity']:.1f}" for r in results]
    assert numbers[1][3] == "1.000" and numbers[2][3] == "-"  # exact routing finds itself
    again = run("demo.py", "--quick", "--out", "out", cwd=tmp_path)  # nothing is left to train
    assert table in again and "is finished" in again
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    sample = (out / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("The function returns") and len(sample) > 40

    tour = run("routing_tour.py", "out/air", cwd=tmp_path)
    last = results[0]["last"]
    assert re.search(r"4,096 tokens fall into \d+ of 64\s+cells", tour)
    found = re.search(r"share of the exact top 32 +│ (0\.\d+)", tour)
    assert found and float(found[1]) == pytest.approx(last["overlap"], abs=0.25)  # other text
    assert "nan" not in tour.split() and max(map(len, tour.splitlines())) <= 80
    shutil.rmtree(out)  # some hundred megabytes of checkpoints


@pytest.mark.slow
def test_the_drop_in_example_swaps_compares_and_undoes() -> None:
    output = run("drop_in.py", "--quick")
    assert "Routers swapped: AirMixtralRouter" in output
    assert re.search(r"model\.layers\.1\.mlp\.gate +64 +16 +16 +50%", output)
    difference = re.search(r"Logits differ by ([\d.e-]+) on average", output)
    assert difference and float(difference[1]) > 0
    assert "Restored: logits differ by 0. Done in" in output.splitlines()[-1]
