"""docs/results.md, its figures and the README's table are what the committed records say."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from airmoe.experiments.report.reading import portable, read_all
from airmoe.experiments.report.rendering import identity
from airmoe.experiments.suites import make_plan
from airmoe.training.automatic import Machine
from tests.docs.common import ROOT, command_lines, load_script

draw_results = load_script("docs/draw_results.py")
RECORDS = ROOT / draw_results.RECORDS


def test_page_readme_and_figures_are_those_of_the_records() -> None:
    pytest.importorskip("matplotlib")
    made = draw_results.make()
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert made.page == page, "run: make results"
    assert made.readme == (ROOT / "README.md").read_text(encoding="utf-8"), "run: make results"
    figures = {f"{one.name}.svg" for one in made.figures}
    assert figures == {file.name for file in (ROOT / draw_results.FIGURES).iterdir()}
    assert figures == set(re.findall(r"\]\(figures/results/([\w-]+\.svg)\)", page))
    block = made.readme.partition("<!-- quality: start -->")[2].partition("<!-- quality: end")[0]
    assert max(line.count("|") for line in block.splitlines()) <= 8  # seven columns


def test_every_record_is_read() -> None:
    record = read_all([RECORDS])
    assert record.problems == []
    assert len(record.runs) == len(list(RECORDS.rglob("*.json"))) >= 5


def test_a_repeated_run_may_replace_its_record() -> None:
    """Made by the command that the page names, on a GPU such as an H200."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (command,) = (line for line in command_lines(page) if line.startswith("airmoe suite main"))
    given = [word for word in shlex.split(command) if "=" in word]
    gpu = Machine(cuda=True, bf16=True, triton=True, memory=140 * 2**30, processes=1)
    plan, _ = make_plan("main", "small", given, epochs=1).settled(gpu, None)
    planned = {run.variant: run.config for run in plan.runs}
    for run in read_all([RECORDS / "main"]).runs:
        again = replace(run, config=portable(planned[run.variant].to_json()))
        assert identity(again) == identity(run), run.name


def test_the_script_writes_all_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "docs").mkdir()
    marks = "Before\n<!-- quality: start -->\nold\n<!-- quality: end -->\nAfter\n"
    (tmp_path / "README.md").write_text(marks, encoding="utf-8")
    draw_results.main(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("Before\n<!-- quality: start -->\nPreset small, English Wikipedia 2015")
    assert text.endswith("\n<!-- quality: end -->\nAfter\n") and "old" not in text
    made, there = (folder / "docs" / "results.md" for folder in (tmp_path, ROOT))
    assert made.read_bytes() == there.read_bytes()
    assert len(list((tmp_path / draw_results.FIGURES).iterdir())) == 6
