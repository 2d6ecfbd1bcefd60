"""The files of a report: Markdown, LaTeX and HTML, escaped; the way back; a record per run."""

from __future__ import annotations

import importlib.util
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe import ConfigError
from airmoe.experiments.report import write_report
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.rendering import NO_FIGURES, markdown, plan_records, tex
from airmoe.files import read_json
from airmoe.training import preset
from tests.experiments.report_toys import (
    change_config,
    write_drawn_suite,
    write_run,
    write_suite,
    write_usage,
)
from tests.training.command import airmoe, assert_one_line, succeeds

STRANGE = r"strange $\frac$ <b> a_b"


class Tags(HTMLParser):
    """Checks that tags close, and remembers ids and what is linked."""

    VOID = ("meta", "link", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on three suites, two single runs, and something that went wrong."""
    pytest.importorskip("matplotlib")
    folder, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("report")
    write_drawn_suite(folder / "main")
    levels = {f"q{level}": 70 + 20 / level for level in (1, 2, 4, 16)}
    write_suite(folder / "granularity", "granularity", levels)
    write_suite(folder / "codebook", "codebook", {"g32-m128": 60.0, "g64-m256": 61.0})
    (folder / "nothing").mkdir()
    write_run(folder / "plain", preset("tiny", "hierarchical"), perplexity=66.0)
    write_run(folder / STRANGE, preset("tiny", "hierarchical"), perplexity=67.0)
    change_config(folder / STRANGE, "training", learning_rate=0.5)
    written = write_report([folder], out)
    assert written.problems[0] == f"{folder.name}/nothing: holds no run" and written.runs == 14
    names = ["report.md", "report.tex", "report.html", "report.json"]
    assert [file.name for file in written.files] == names
    return out


def test_report_json_writes_all_the_others_again(out: Path, tmp_path: Path) -> None:
    write_report([out / "report.json"], tmp_path)
    files = sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())
    assert len([file for file in files if file.suffix == ".svg"]) >= 12
    assert files == sorted(f.relative_to(tmp_path) for f in tmp_path.rglob("*") if f.is_file())
    assert [one for one in files if (out / one).read_bytes() != (tmp_path / one).read_bytes()] == []


def test_without_matplotlib_all_but_the_figures(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    hidden = {"matplotlib": None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: hidden.get(name, real(name, *rest))
    )
    written = write_report([out / "report.json"], tmp_path)
    assert [line for line in written.problems if "matplotlib" in line] == [NO_FIGURES]
    text, with_figures = ((folder / "report.md").read_text() for folder in (tmp_path, out))
    tables = [line for line in with_figures.splitlines() if line.startswith("|")]
    assert tables and [line for line in text.splitlines() if line.startswith("|")] == tables
    assert "![" not in text and "![" in with_figures and not (tmp_path / "figures").exists()


def test_markdown(out: Path) -> None:
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "## Main: tiny, python-docs, 184,320 tokens" in text
    assert "| AIR | 2 | **62.00 ± 1.41** |" in text
    assert "| *Exact granular*‡ | *2* | *60.25 ± 0.35* |" in text
    assert "Fit of L(Q) = a / Q^b + c to 4 points" in text
    assert "## Left out, and why\n\n- " in text
    for name in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (out / name).is_file(), name
        assert (out / name).with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_latex(out: Path) -> None:
    text = (out / "report.tex").read_text(encoding="utf-8")
    assert r"AIR & 2 & \textbf{62.00 ± 1.41} &" in text
    assert r"\textit{Exact granular}‡ &" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 5
    assert r"Hierarchical (strange \$\textbackslash{}frac\$ <b> a\_b)" in text


def test_html_is_whole_and_alone(out: Path) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert len(tags.ids) == len(set(tags.ids))
    anchors = [link[1:] for link in tags.links if link.startswith("#")]
    assert anchors and set(anchors) <= set(tags.ids)
    assert all(link.startswith(("#", "data:")) for link in tags.links)
    assert page.count("<svg") == len(list((out / "figures").glob("*.svg")))
    assert "@import" not in page and "url(http" not in page
    assert "<b>" not in page and r"Hierarchical (strange $\frac$ &lt;b&gt; a_b)" in page


def test_figures_keep_their_text(out: Path) -> None:
    (file,) = (out / "figures").glob("main-*-perplexity-flops.svg")
    drawing = file.read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawing)
    expected = {"AIR", "PEER", "Exact granular", "validation perplexity"}
    assert expected | {"training FLOPs, algorithmic (T)"} <= set(texts)
    assert "system-ui" in drawing and "DejaVu" not in drawing
    (file,) = (out / "figures").glob("single-*-perplexity-flops.svg")
    assert r"Hierarchical (strange $\frac$ &lt;b&gt; a_b)" in file.read_text(encoding="utf-8")


def test_escapes() -> None:
    assert tex(r"50% of a_b {x} \y $z$ & #1 ~ ^ é") == (
        r"50\% of a\_b \{x\} \textbackslash{}y \$z\$ \& \#1 \textasciitilde{} \textasciicircum{} é"
    )
    found = markdown("<a> & a_b | `c` *d* [e](f)\n\x1b[31m")
    assert found == r"\<a\> &amp; a\_b \| \`c\` \*d\* \[e\](f) \\x1b\[31m"


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = tmp_path / "runs"
    write_suite(runs / "book", "codebook", {"g32-m128": {"perplexity": 66.0}})
    printed = succeeds("report", runs, "--records", tmp_path / "records")
    names = ("report.md", "report.tex", "report.html", "report.json")
    assert printed.splitlines() == [
        "1 runs reported:",
        *(f"  {runs / 'report' / name}" for name in names),
        f"  {tmp_path / 'records' / 'codebook' / 'g32-m128-seed42.json'}",
    ]
    # The folder of the report is no run, and a report.json is written again where it lies.
    again = airmoe("report", runs / "report" / "report.json")
    assert again.out.splitlines() == printed.splitlines()[:-1]
    assert len(read_all([runs]).runs) == 1


def test_names_that_are_no_text_are_escaped(tmp_path: Path) -> None:
    """Paths may hold any bytes, and records any string."""
    for name, rate in ((b"good", 0.001), (b"\xff\x1b[31m", 0.002)):
        folder = tmp_path / "runs" / os.fsdecode(name)
        about = {"versions": {"torch": "\ud800"}}
        write_run(folder, [f"training.learning_rate={rate}"], about=about)
    (tmp_path / "runs" / os.fsdecode(b"\xfe")).mkdir()
    printed = succeeds("report", tmp_path / "runs", "--records", tmp_path / "records")
    assert r"runs/\udcfe: holds no run" in printed
    page = (tmp_path / "runs" / "report" / "report.html").read_text(encoding="utf-8")
    assert r"AIR (\udcff\x1b[31m)" in page and "\x1b" not in page
    assert len(read_all([tmp_path / "records"]).runs) == 2


def test_the_command_without_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = airmoe("report", tmp_path / "empty", tmp_path / "gone")
    assert_one_line(outcome, 2, "must hold at least one finished run", "holds no run", "no such f")
    assert not (tmp_path / "empty" / "report").exists()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two suites that share AIR, and a single run."""
    folder = tmp_path / "runs"
    write_suite(folder / "a", "main", {"air": [61.0, 62.0]}, seeds=(1, 2))
    write_suite(folder / "b", "ablations", {"air": {"perplexity": 61.0, "test": 70.0}}, seeds=(1,))
    write_run(folder / "mine", preset("tiny", "coarse"), perplexity=66.0)
    write_usage(folder / "a" / "air-seed2", np.arange(4096))
    return folder


def records_of(runs: Path, folder: Path) -> list[str]:
    planned = plan_records(read_all([runs]).runs, folder)
    return sorted(str(path.relative_to(folder)) for path in planned)


@pytest.fixture
def records(runs: Path, tmp_path: Path) -> Path:
    succeeds("report", runs, "--out", tmp_path / "out", "--records", tmp_path / "records")
    return tmp_path / "records"


def test_a_folder_of_records_is_the_runs_themselves(runs: Path, records: Path) -> None:
    names = ["ablations/air-seed1", "main/air-seed1", "main/air-seed2", "single/mine"]
    assert records_of(runs, records) == [f"{name}.json" for name in names]
    found, again = read_all([runs]), read_all([records])

    def key(run: Run) -> tuple[Any, ...]:
        return str(run.suite), run.variant, run.seed

    assert again.problems == []
    assert sorted(again.runs, key=key) == sorted(found.runs, key=key)
    assert read_json(records / "main" / "air-seed2.json")["runs"][0]["usage"] is not None


def test_another_run_of_that_name_is_refused(runs: Path, records: Path) -> None:
    assert len(records_of(runs, records)) == 4  # the same runs again
    change_config(runs / "mine", "training", learning_rate=0.5)
    with pytest.raises(ConfigError, match=r"single/mine.json.*cannot take runs/mine.*another run"):
        records_of(runs, records)
    (records / "single" / "mine.json").write_text('{"mine": true}', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        records_of(runs, records)


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder, rate in (("x", 0.002), ("y", 0.003)):
        write_run(tmp_path / "runs" / folder / "air", [f"training.learning_rate={rate}"])
    with pytest.raises(ConfigError, match=r"cannot take runs/y/air: runs/x/air has that name too"):
        records_of(tmp_path / "runs", tmp_path / "records")
