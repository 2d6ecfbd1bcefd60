"""The files of a report, from run folders or from an earlier report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from airmoe.experiments.report.contents import make_report
from airmoe.experiments.report.html import html
from airmoe.experiments.report.latex import latex
from airmoe.experiments.report.markdown import markdown
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import write_record


@dataclass(frozen=True)
class Written:
    """What was made, and what a reader must know about it."""

    files: list[Path]  # without the figures
    runs: int
    problems: list[str]


def write_report(paths: Sequence[Path], out: Path | None = None) -> Written:
    """Report on everything under `paths`; by default in or beside the first of them."""
    record = read_all(paths)
    report = make_report(record)
    folder = out or _default_folder(paths)
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for drawing in report.drawings:
        (figures / f"{drawing.picture.name}.svg").write_text(drawing.svg, encoding="utf-8")
        (figures / f"{drawing.picture.name}.pdf").write_bytes(drawing.pdf)
    inline = {drawing.picture.name: drawing.inline for drawing in report.drawings}
    texts = {
        "report.md": markdown(report.document),
        "report.tex": latex(report.document),
        "report.html": html(report.document, inline),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_record(record, folder / "report.json")
    files = [folder / name for name in (*texts, "report.json")]
    return Written(files, len(record.runs), report.problems)


def _default_folder(paths: Sequence[Path]) -> Path:
    """Of the first path with something in it: one that is not there, or empty, was a mistake."""
    for path in paths:
        if path.is_file():
            return path.parent
        if _holds_something(path):
            return path / "report"
    raise AssertionError("a run was read from one of the paths")


def _holds_something(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False
