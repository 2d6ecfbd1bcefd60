"""Markdown, LaTeX and HTML of one report: cells, escapes, and the way back from report.json."""

from __future__ import annotations

import errno
import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airmoe.experiments.report import write_report
from airmoe.experiments.report.contents import NO_FIGURES, Figures, Report, Section
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.rendering import TEX_LETTERS, markdown, render, tex
from airmoe.experiments.report.tables import Cell, Table
from airmoe.files import read_json
from airmoe.training import override, preset
from tests.experiments.report_toys import write_drawn_suite, write_run, write_suite
from tests.training.command import airmoe, assert_one_line

NASTY = "<script>alert('1')</script> & 50% of a_b {x} \\y $z$ #1 ~ ^ | `c` *d* [e](f)"

STRANGE_NAME = r"strange $\frac$ <b> a_b"


class Tags(HTMLParser):
    """Checks that tags close, and remembers ids and what was said where."""

    VOID = ("meta", "link", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four suites, a single run, and something that went wrong."""
    folder = tmp_path_factory.mktemp("runs")
    write_drawn_suite(folder / "main")
    levels = {f"q{level}": 70 + 20 / level for level in (1, 2, 4, 16)}
    write_suite(folder / "granularity", "granularity", levels)
    books = {f"g{g}-m{m}": 60.0 + g / m for g in (32, 64) for m in (128, 256)}
    write_suite(folder / "codebook", "codebook", books)
    (folder / "nothing").mkdir()
    config = override(preset("tiny", "hierarchical"), [f"data.folder={NASTY}", "training.steps=9"])
    write_run(folder / "nasty", config, perplexity=66.0)
    config = override(config, ["training.log_every=7"])
    write_run(folder / STRANGE_NAME, config, perplexity=67.0)
    return folder


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    written = write_report([folder], out)
    assert written.problems == [f"{folder.name}/nothing: is empty"]
    assert written.runs == 16
    assert [file.name for file in written.files] == [
        "report.md",
        "report.tex",
        "report.html",
        "report.json",
    ]
    return out


def test_report_json_writes_all_the_others_again(out: Path, tmp_path: Path) -> None:
    write_report([out / "report.json"], tmp_path)
    files = sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())
    assert len([file for file in files if file.suffix == ".svg"]) >= 12
    assert files == sorted(f.relative_to(tmp_path) for f in tmp_path.rglob("*") if f.is_file())
    different = [
        file for file in files if (out / file).read_bytes() != (tmp_path / file).read_bytes()
    ]
    assert different == []


def test_without_matplotlib_all_but_the_figures(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    hidden = {"matplotlib": None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: hidden.get(name, real(name, *rest))
    )
    for name in [*filter(lambda name: name.startswith("matplotlib"), sys.modules), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    written = write_report([out / "report.json"], tmp_path)
    assert [line for line in written.problems if "matplotlib" in line] == [NO_FIGURES]
    assert "pip install 'airmoe[plot]'" in NO_FIGURES
    text, with_figures = ((folder / "report.md").read_text() for folder in (tmp_path, out))
    tables = [line for line in with_figures.splitlines() if line.startswith("|")]
    assert tables and [line for line in text.splitlines() if line.startswith("|")] == tables
    assert "![" not in text and "![" in with_figures and not (tmp_path / "figures").exists()
    assert "<figure" not in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.json").read_bytes() == (out / "report.json").read_bytes()


def test_a_full_disk_leaves_what_was_there(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report([out / "report.json"], tmp_path)
    for file in (tmp_path / "figures").iterdir():
        file.write_bytes(b"old")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("airmoe.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_report([out / "report.json"], tmp_path)
    found = list((tmp_path / "figures").iterdir())
    assert found and {file.read_bytes() for file in found} == {b"old"}


def test_report_json_is_small_and_knows_no_machine(out: Path, folder: Path) -> None:
    text = (out / "report.json").read_text(encoding="utf-8")
    assert len(text) < 250_000
    assert str(folder) not in text and str(folder.parent) not in text
    assert read_json(out / "report.json")["format"] == 2


def test_markdown(out: Path) -> None:
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "## Main: tiny, python-docs, 184,320 tokens" in text
    assert "| AIR | 2 | **62.00 ± 1.41** |" in text
    assert "| *Exact granular*‡ | *2* | *60.25 ± 0.35* |" in text
    assert "Fit of L(Q) = a / Q^b + c to 4 points" in text
    assert "## Left out, and why\n\n- " in text
    for name in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (out / name).is_file(), name


def test_latex(out: Path) -> None:
    text = (out / "report.tex").read_text(encoding="utf-8")
    assert r"AIR & 2 & \textbf{62.00 $\pm$ 1.41} &" in text
    assert r"\textcolor{gray}{Exact granular}$\ddagger$ &" in text
    for kind in ("table", "tabular", "figure", "longtable", "itemize", "document"):
        assert text.count(f"\\begin{{{kind}}}") == text.count(f"\\end{{{kind}}}") > 0
    for name in re.findall(r"\{(figures/[^}]+)\}", text):
        assert (out / name).read_bytes().startswith(b"%PDF"), name


def test_html_is_whole_and_alone(out: Path) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert len(tags.ids) == len(set(tags.ids))
    targets = [value for tag, name, value in tags.attributes if tag == "a" and name == "href"]
    assert targets and all(target and target[1:] in tags.ids for target in targets)
    for _, name, value in tags.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value is not None and value.startswith(("data:", "#")), (name, value)
    assert page.count("<svg") == len(list((out / "figures").glob("*.svg")))
    assert "@import" not in page and "url(http" not in page


def test_figures_keep_their_text(out: Path) -> None:
    (file,) = (out / "figures").glob("main-*-perplexity-flops.svg")
    drawing = file.read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawing)
    expected = {"AIR", "PEER", "Exact granular", "validation perplexity"}
    assert expected | {"training FLOPs, algorithmic (T)"} <= set(texts)
    assert "system-ui" in drawing and "DejaVu" not in drawing


@pytest.fixture
def nasty() -> Report:
    """A report that says the same everywhere."""
    table = Table(
        caption=NASTY,
        columns=[NASTY, "n"],
        rows=[[Cell(text=NASTY), Cell(text="1 ± 2", value=1.0, bold=True, mark="†")]],
        notes=[NASTY],
    )
    words = Table(caption="s", columns=["s", "v"], rows=[[Cell(text=NASTY)] * 2], words=True)
    drawing: Any = SimpleNamespace(name="p", caption=NASTY, alt=NASTY, inline="<svg></svg>", wide=0)
    group: Any = None  # no template asks for it
    section = Section(
        title=NASTY,
        slug="anchor",
        group=group,
        claims=None,
        table=table,
        fit=NASTY,
        paper=None,
        figures=[Figures(title=NASTY, slug="more", drawings=[drawing])],
        settings=words,
    )
    return Report(sections=[section], left_out=[NASTY], notes=[NASTY], title=NASTY)


def test_everything_is_escaped_in_html(nasty: Report) -> None:
    page = render(nasty, "html")
    Tags(page)
    assert "<script>alert" not in page
    escaped = "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; 50%"
    assert page.count(escaped) == page.count("alert(") == 17
    assert '<td data-value="1.0"><strong>1 ± 2</strong><sup>†</sup></td>' in page


def test_everything_is_escaped_in_latex(nasty: Report) -> None:
    text = render(nasty, "tex")
    escaped = (
        r"\textless{}script\textgreater{}alert('1')\textless{}/script\textgreater{} \& 50\% of "
        r"a\_b \{x\} \textbackslash{}y \$z\$ \#1 \textasciitilde{} \textasciicircum{} \textbar{} "
        "`c` *d* [e](f)"
    )
    assert text.count(escaped) == text.count("[e](f)") == 13
    assert r"\textbf{1 $\pm$ 2}$\dagger$" in text


def test_everything_is_escaped_in_markdown(nasty: Report) -> None:
    text = render(nasty, "md")
    assert r"\<script\>alert('1')\</script\> &amp; 50% of a\_b {x} \\y \$z\$ \#1" in text
    assert text.count(r"\| \`c\` \*d\* \[e\](f)") == text.count("(f)")
    (row,) = [line for line in text.splitlines() if line.endswith("| **1 ± 2**† |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_markdown_shows_escape_codes() -> None:
    assert markdown("a\x1b[31m\nred\x07") == r"a\\x1b\[31m red\\x07"


def test_latex_names_what_it_cannot_set() -> None:
    found = tex("é Łódź “x” 中文 \x1b e\u0301 µ ± † ≤")
    assert found == r"é Łódź “x” U+4E2DU+6587 U+001B é U+00B5 $\pm$ $\dagger$ U+2264"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_pdflatex_sets_every_character_that_is_let_through(tmp_path: Path) -> None:
    words = " ".join([*sorted(TEX_LETTERS), *map(chr, range(33, 127)), "中", NASTY])
    text = render(Report(sections=[], left_out=[words], notes=[]), "tex")
    (tmp_path / "report.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]


def test_texts_from_files_are_escaped(out: Path) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "<b>" not in page and r"hierarchical (strange $\frac$ &lt;b&gt; a_b)" in page
    (file,) = (out / "figures").glob("single-runs-*-perplexity-flops.svg")
    assert r"hierarchical (strange $\frac$ &lt;b&gt; a_b)" in file.read_text(encoding="utf-8")


def test_the_command(folder: Path) -> None:
    outcome = airmoe("report", folder / "codebook")
    assert (outcome.code, outcome.err) == (0, "")
    report = folder / "codebook" / "report"
    names = ("report.md", "report.tex", "report.html", "report.json")
    assert outcome.out.splitlines() == [
        "4 runs reported:",
        *(f"  {report / name}" for name in names),
    ]
    # The folder of the report is no run, and a report.json is written again where it lies.
    again = airmoe("report", report / "report.json")
    assert again.out == outcome.out
    assert len(read_all([folder / "codebook"]).runs) == 4


def test_the_report_lies_with_the_first_path_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run")
    written = write_report([tmp_path / "gone", tmp_path / "empty", tmp_path / "run"])
    assert {file.parent for file in written.files} == {tmp_path / "run" / "report"}
    assert not (tmp_path / "gone").exists() and not any((tmp_path / "empty").iterdir())


def test_the_command_without_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = airmoe("report", tmp_path / "empty", tmp_path / "gone")
    assert_one_line(outcome, 2, "must hold at least one finished run", "is empty", "no such file")
    assert not (tmp_path / "empty" / "report").exists()
