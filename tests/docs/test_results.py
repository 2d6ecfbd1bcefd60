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
from airmoe.training.devices import Machine
from tests.docs.common import ROOT, command_lines, load_script

draw_results = load_script("docs/draw_results.py")
RECORDS = ROOT / draw_results.RECORDS


def test_the_script_writes_page_readme_and_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "docs").mkdir()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, start, rest = readme.partition("<!-- quality: start -->\n")
    block, end, after = rest.partition("<!-- quality: end -->\n")
    assert block.startswith("Preset small, English Wikipedia 2015")
    assert max(line.count("|") for line in block.splitlines()) <= 8  # seven columns
    old = f"{before}{start}old\n{end}{after}"
    (tmp_path / "README.md").write_text(old, encoding="utf-8")
    draw_results.main(tmp_path)
    page = (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")
    now = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == now, "run: make results"
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme, "run: make results"
    figures, there = (
        {file.name for file in (folder / draw_results.FIGURES).iterdir()}
        for folder in (tmp_path, ROOT)
    )
    assert len(figures) == 6 and figures == there
    assert figures == set(re.findall(r"\]\(figures/results/([\w-]+\.svg)\)", page))


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
