"""One file per run, to commit: FOLDER/<suite, or single>/<run>.json, each a report.json of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from airmoe.errors import ConfigError
from airmoe.experiments.report.record import Record, Run, read_record, write_record
from airmoe.experiments.report.record_files import cannot_take, check_name, write_files

SINGLE = "single"


def plan_records(runs: Sequence[Run], folder: Path) -> dict[Path, Run]:
    """Where each run goes; raises where a file would hold another run than before, or two.

    A run that was found twice goes there once, as it was found first.
    """
    planned: dict[Path, Run] = {}
    for run in runs:
        path = folder / file_of(run)
        if not is_same(run, other := planned.setdefault(path, run)):
            raise _taken(path, run, f"{other.name} has that name too")
    for path, run in planned.items():
        if path.exists() and not _holds(path, run):
            raise _taken(path, run, "the file there is of another run")
    return planned


def write_records(planned: Mapping[Path, Run]) -> None:
    """The files of `plan_records`."""
    write_files(planned, lambda run, path: write_record(Record(runs=[run], problems=[]), path))


def file_of(run: Run) -> PurePosixPath:
    """`main/air-seed42.json`: a run may belong to two suites, and has a file in each."""
    suite, name = run.suite or SINGLE, PurePosixPath(run.name).name
    check_name(suite, "its records get a folder", "Rename the suite.")
    return PurePosixPath(suite, f"{name}.json")


def is_same(run: Run, other: Run) -> bool:
    """Whether they are one run, or the same run made again."""
    return (run.suite, run.variant, run.settings, run.data_sha256) == (
        other.suite,
        other.variant,
        other.settings,
        other.data_sha256,
    )


def _holds(path: Path, run: Run) -> bool:
    try:
        found = read_record(path).runs
    except ConfigError:
        return False
    return len(found) == 1 and is_same(run, found[0])


def _taken(path: Path, run: Run, rule: str) -> ConfigError:
    remedy = "Rename one of the run folders, or give another folder for the records."
    return cannot_take(path, run.name, rule, remedy)
