"""How the routers fare through training: what is kept of the log, and what is drawn of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from airmoe.experiments.report.figures.curves import series
from airmoe.experiments.report.figures.health import health_figures
from airmoe.experiments.report.groups import Group, group_runs
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import Run, read_record, write_record
from airmoe.files import read_json, write_json
from tests.experiments.report_toys import write_suite


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """AIR has shortlists, a hierarchical router cells alone, PEER neither."""
    runs = {
        "air": {
            "perplexity": [61.0, 63.0],
            "dead_experts": [0.01, 0.03],
            "codeword_perplexity": 27.0,
            "staleness": 0.004,
        },
        "peer": {"perplexity": [64.0, 65.0], "dead_experts": 0.0},
        "hierarchical": {"perplexity": [66.0, 66.0], "codeword_perplexity": 14.0},
    }
    write_suite(tmp_path / "s", "main", runs, seeds=(42, 43))
    (group,) = group_runs(read_all([tmp_path / "s"]).runs).groups
    return group


def test_what_is_kept_of_the_log(group: Group) -> None:
    air, peer = (group.variants[name][0] for name in ("air", "peer"))
    assert air.training["staleness"] == [0.004] * 12
    assert air.training["codeword_perplexity"] == [27.0] * 12
    assert air.evaluations["dead_experts"] == [0.01] * 6
    assert air.evaluations["entropy"] == air.training["entropy"][:6] == [7.9] * 6
    assert "staleness" not in peer.training and "codeword_perplexity" not in peer.evaluations


def test_figures_of_those_that_have_the_numbers(group: Group) -> None:
    pytest.importorskip("matplotlib")
    figures = {
        one.picture.name.removeprefix(f"{group.slug}-"): one for one in health_figures(group)
    }
    assert list(figures) == ["dead-experts", "codeword-perplexity", "staleness"]
    ends = {name: one.picture.alt.partition(" At the end: ")[2] for name, one in figures.items()}
    assert ends == {
        "dead-experts": "AIR 2, PEER 0, Hierarchical 2.",  # the mean of 1 % and 3 %
        "codeword-perplexity": "AIR 27, Hierarchical 14.",
        "staleness": "AIR 0.4.",
    }
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", figures["dead-experts"].svg)
    assert {"dead experts (%)", "training tokens (k)", "AIR", "PEER"} <= set(texts)


def test_records_from_before_these_numbers(group: Group, tmp_path: Path) -> None:
    later = ("dead_experts", "entropy", "codeword_perplexity", "staleness", "tokens_per_second")

    def older(run: Run) -> Run:
        curves = {
            name: {key: values for key, values in getattr(run, name).items() if key not in later}
            for name in ("evaluations", "training")
        }
        return replace(run, **curves)

    record = read_all([tmp_path / "s"])
    write_record(replace(record, runs=[older(run) for run in record.runs]), tmp_path / "old.json")
    values = read_json(tmp_path / "old.json")
    for run in values["runs"]:
        del run["test"], run["peak_memory_gib"]
    write_json(tmp_path / "old.json", values)
    runs = read_record(tmp_path / "old.json").runs
    assert (runs[0].test, runs[0].peak_memory_gib) == (None, None)
    (old,) = group_runs(runs).groups
    assert health_figures(old) == []
    assert series(old, "tokens", "overlap", "training") != []
