"""docs/results.md is what the committed result files say."""

from __future__ import annotations

import re

import pytest

from tests.docs.common import ROOT, load_script

draw_results = load_script("docs/draw_results.py")


def test_page_and_figures_are_those_of_the_files() -> None:
    pytest.importorskip("matplotlib")
    made = draw_results.report()
    page = draw_results.page(made)
    assert page == draw_results.PAGE.read_text(encoding="utf-8"), "run: python docs/draw_results.py"
    files = {path.stem for path in draw_results.FIGURES.glob("*.svg")}
    assert files == {drawing.picture.name for drawing in made.drawings}
    assert files == set(re.findall(r"figures/results/([\w-]+)\.svg", page))


def test_every_result_file_is_read() -> None:
    found = sorted(path.parent.name for path in (ROOT / "results").glob("*/report.json"))
    assert found and all((ROOT / "results" / name / "report.json").stat().st_size for name in found)
