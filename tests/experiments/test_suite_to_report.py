"""`make report` at toy size: five methods and four ablations trained, then reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from airmoe.files import read_json
from tests.experiments.forked import fork_runs
from tests.training.command import succeeds
from tests.training.runs import assignments, small_model, small_run

pytestmark = pytest.mark.slow
SUITES = {
    "main": ("air", "peer", "hierarchical", "exact", "coarse"),
    "ablations": ("air", "no_projection", "static", "expert_choice", "euclidean"),
}


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("report")
    config = small_run(folder, small_model(num_experts_per_tok=8), steps=6, eval_every=3)
    for name in SUITES:
        arguments = ["suite", name, "tiny", *assignments(config), "--out", folder / "suites" / name]
        succeeds(*arguments, patch=fork_runs())
    return folder / "suites"


def test_every_run_is_in_the_report(suites: Path, tmp_path: Path) -> None:
    succeeds("report", suites, "--out", tmp_path)
    page, text = ((tmp_path / f"report.{end}").read_text() for end in ("html", "md"))
    for suite, variants in SUITES.items():
        for variant in variants:
            result = read_json(suites / suite / f"{variant}-seed42" / "result.json")
            assert f"{result['best']['perplexity']:.2f}" in text, (suite, variant)
            assert result["best"]["flops"] > 0
    assert page.count("<svg") >= 2 * 4 and "http://" not in page.replace("http://www.w3.org", "")
    assert "Nothing." in text.partition("Left out, and why")[2]
