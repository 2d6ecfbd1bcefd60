"""One file per study, beside those of runs: FOLDER/<run>/recall.json.

One that lies elsewhere in FOLDER already stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from airmoe.errors import ConfigError
from airmoe.experiments.recall_study.reading import study_from_json
from airmoe.experiments.recall_study.record import FILE, RecallStudy
from airmoe.experiments.report.record_files import cannot_take, check_name, write_files
from airmoe.files import read_json, write_json


def plan_studies(
    studies: Sequence[RecallStudy], folder: Path, taken: Collection[Path] = ()
) -> dict[Path, RecallStudy]:
    """Where each study goes; raises where a file would hold something else than before, or two."""
    planned: dict[Path, RecallStudy] = {}
    there = {path: _study_of(path) for path in sorted(folder.rglob(FILE))}
    for study in studies:
        path = folder / _file_of(study)
        if any(other != path and found == study for other, found in there.items()):
            continue
        if path in taken or planned.setdefault(path, study) != study:
            raise _taken(path, study, "something else has that name too")
        if path.exists() and not _holds(path, study):
            raise _taken(path, study, "the file there is no study of that run")
    return planned


def write_studies(planned: Mapping[Path, RecallStudy]) -> None:
    """The files of `plan_studies`."""
    write_files(planned, lambda study, path: write_json(path, study.to_json()))


def _file_of(study: RecallStudy) -> PurePosixPath:
    remedy = "Measure the run again: airmoe recall RUN."
    check_name(study.run, "its study gets a folder", remedy)
    return PurePosixPath(study.run, FILE)


def _holds(path: Path, study: RecallStudy) -> bool:
    """Whether it is of the same run and text, however long that was read."""
    found = _study_of(path)
    return found is not None and (found.run, found.settings, found.data_sha256) == (
        study.run,
        study.settings,
        study.data_sha256,
    )


def _study_of(path: Path) -> RecallStudy | None:
    try:
        return study_from_json(read_json(path))
    except (OSError, ValueError):
        return None


def _taken(path: Path, study: RecallStudy, rule: str) -> ConfigError:
    remedy = "Give the studies one by one, or another folder for the records."
    return cannot_take(path, f"the study of {study.run}", rule, remedy)
