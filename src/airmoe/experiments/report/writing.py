"""The files of a report, from run folders or from files of earlier reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from airmoe.experiments.report.contents import make_report
from airmoe.experiments.report.reading import one_map_each, read_everything
from airmoe.experiments.report.record import plan_records, write_record, write_records
from airmoe.experiments.report.rendering import FORMATS, render
from airmoe.files import write_bytes

REPORT = "report.json"


@dataclass(frozen=True)
class Written:
    """What was made, and what a reader must know about it."""

    files: list[Path]  # without the figures
    records: list[Path]
    runs: int
    problems: list[str]


def write_report(
    paths: Sequence[Path], out: Path | None = None, records: Path | None = None
) -> Written:
    """Report on everything under `paths`; by default in or beside the first of them.

    `records`: a folder that gets a file per run too, with its map whatever the report draws.
    """
    found = read_everything(paths, ignored=_own_report(paths, out))
    planned = {} if records is None else plan_records(found.runs, records)
    record = one_map_each(found)
    report = make_report(record)
    folder = out or default_folder(paths)
    figures = folder / "figures"
    (figures if report.drawings else folder).mkdir(parents=True, exist_ok=True)
    for drawing in report.drawings:
        write_bytes(figures / f"{drawing.name}.svg", drawing.svg.encode())
        write_bytes(figures / f"{drawing.name}.pdf", drawing.pdf)
    texts = {f"report.{ending}": render(report, ending) for ending in FORMATS}
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
    write_record(record, folder / REPORT)
    write_records(planned)
    files = [folder / name for name in (*texts, REPORT)]
    return Written(files, [*planned], len(record.runs), report.problems)


def _own_report(paths: Sequence[Path], out: Path | None) -> Path | None:
    """The report.json that will be replaced, unless it was asked for: its runs are not new ones."""
    if out is None or {out.resolve(), (out / REPORT).resolve()} & {
        path.resolve() for path in paths
    }:
        return None
    return out / REPORT


def default_folder(paths: Sequence[Path]) -> Path:
    """Of the first path with something in it: one that is not there, or empty, was a mistake.

    Beside a report.json, which it replaces; beside other records it would be one more of them.
    """
    for path in paths:
        if path.is_file():
            return path.parent if path.name == REPORT else path.parent / "report"
        if _holds_something(path):
            return path / "report"
    raise AssertionError("a run was read from one of the paths")


def _holds_something(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False
