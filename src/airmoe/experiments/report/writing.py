"""The files of a report, and the records of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from airmoe.errors import ConfigError
from airmoe.experiments.report.contents import make_report
from airmoe.experiments.report.reading import is_name, one_map_each, read_everything
from airmoe.experiments.report.record import Record, Run, read_record, write_record
from airmoe.experiments.report.rendering import FORMATS, render
from airmoe.files import write_bytes

REPORT = "report.json"
SINGLE = "single"  # the folder of runs of no suite


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
    for path, run in planned.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(Record(runs=[run], problems=[]), path)
    files = [folder / name for name in (*texts, REPORT)]
    return Written(files, [*planned], len(record.runs), report.problems)


def _own_report(paths: Sequence[Path], out: Path | None) -> Path | None:
    """The report.json that will be replaced: not to be read, unless it was asked for."""
    if out is None:
        return None
    asked_for = {path.resolve() for path in paths} & {out.resolve(), (out / REPORT).resolve()}
    return None if asked_for else out / REPORT


def default_folder(paths: Sequence[Path]) -> Path:
    """`report/` in the first path with something in it.

    A report.json is replaced where it is; beside other records it would pass for one of them.
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


def plan_records(runs: Sequence[Run], folder: Path) -> dict[Path, Run]:
    """The file of each run; raises where one would hold two runs, or another run than before.

    A run that was found twice goes there once, as it was found first.
    """
    planned: dict[Path, Run] = {}
    for run in runs:
        path = folder / file_of(run)
        if not _is_same(run, other := planned.setdefault(path, run)):
            raise _taken(path, run, f"{other.name} has that name too")
    for path, run in planned.items():
        if path.exists() and not _holds(path, run):
            raise _taken(path, run, "the file there is of another run")
    return planned


def file_of(run: Run) -> PurePosixPath:
    """`main/air-seed42.json`: a run may belong to two suites, and has a file in each."""
    suite = run.suite or SINGLE
    if not is_name(suite):
        rule = "must be a name, because its records get a folder"
        raise ConfigError("records", suite, rule, "Rename the suite.")
    return PurePosixPath(suite, f"{PurePosixPath(run.name).name}.json")


def _is_same(run: Run, other: Run) -> bool:
    """Whether they are one run, or the same run repeated."""
    one, two = ((it.suite, it.variant, it.settings, it.data_sha256) for it in (run, other))
    return one == two


def _holds(path: Path, run: Run) -> bool:
    try:
        found = read_record(path).runs
    except ConfigError:
        return False
    return len(found) == 1 and _is_same(run, found[0])


def _taken(path: Path, run: Run, rule: str) -> ConfigError:
    remedy = "Rename one of the run folders, or give another folder for the records."
    return ConfigError("records", str(path), f"cannot take {run.name}: {rule}", remedy)
