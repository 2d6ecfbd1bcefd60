"""Run folders, suite folders and files of reports -> a record, with a line for each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeGuard

from safetensors import SafetensorError

from airmoe.errors import ConfigError
from airmoe.experiments.fairness import Rule
from airmoe.experiments.report.finished import Member, finished_run
from airmoe.experiments.report.groups import Key, key_of, settings_of
from airmoe.experiments.report.record import Record, Run, read_record
from airmoe.experiments.report.usage import ExpertMap, read_usage
from airmoe.experiments.suites.folder import FORMAT as SUITE_FORMAT
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.files import parse_json, read_json
from airmoe.training.checkpoints import USAGE
from airmoe.training.config import RunConfig
from airmoe.training.run_folder import open_run

RUN_FILES = ("run.json", "result.json", "log.jsonl")
# What may be left, without any of these, of a run that was killed or copied in part.
REMAINS = ("run.json.draft", "result.json.draft", "suite.json.draft", "checkpoint-*", USAGE)
HALF_WRITTEN = "is half written: no run.json"
NEVER_RUNS = ("tensorboard", "report", "figures")
WRONG_JSON = (ValueError, KeyError, TypeError, AttributeError)


def read_all(paths: Sequence[Path]) -> Record:
    """Everything under `paths`, without the maps that no report draws."""
    return one_map_each(read_everything(paths))


def read_everything(paths: Sequence[Path], ignored: Path | None = None) -> Record:
    """Everything under `paths` except one file; raises where there is no run at all."""
    reader = Reader(seen=set() if ignored is None else {ignored.resolve()})
    for path in paths:
        with reader.unreadable(str(path)):
            reader.read(path)
    if not reader.runs:
        found = f" ({'; '.join(reader.problems)})" if reader.problems else ""
        raise ConfigError(
            "runs",
            ", ".join(map(str, paths)),
            f"must hold at least one finished run{found}",
            "Give run folders, suite folders, or a report.json.",
        )
    return Record(runs=reader.runs, problems=reader.problems)


def one_map_each(record: Record) -> Record:
    """Keep one map per row: only one is drawn, and maps are most of a report.json."""
    drawn: set[tuple[Key, str, str]] = set()
    kept = []
    for run in record.runs:
        if run.usage is not None and run.usage.levels is not None:
            row = (key_of(run), run.variant, settings_of(run))
            if row in drawn:
                run = replace(run, usage=replace(run.usage, levels=None))
            drawn.add(row)
        kept.append(run)
    return replace(record, runs=kept)


@dataclass
class Reader:
    """Collects runs and problems; a folder or file met twice counts once."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    def problem(self, name: str, text: str) -> None:
        """Add a problem, as one line."""
        self.problems.append(f"{name}: {' '.join(text.split())}")

    @contextmanager
    def unreadable(self, name: str) -> Iterator[None]:
        """Turn an error of the file system into a problem."""
        try:
            yield
        except OSError as error:
            self.problem(name, f"cannot be read ({type(error).__name__}: {error.strerror})")

    def read(self, path: Path) -> None:
        if path.is_file():
            self.read_report(path, path.name)
        elif path.is_dir():
            self.read_folder(path, path.resolve().name)
        else:
            self.problem(str(path), "there is no such file or folder")

    def _is_new(self, path: Path) -> bool:
        found = path.resolve()
        is_new = found not in self.seen
        self.seen.add(found)
        return is_new

    def read_report(self, path: Path, name: str) -> None:
        """A report.json or the record of one run."""
        if not self._is_new(path):
            return
        try:
            record = read_record(path, name)
        except ConfigError as error:
            self.problem(name, str(error))
            return
        self.runs += record.runs
        self.problems += record.problems

    def read_folder(self, path: Path, name: str) -> None:
        """A suite, a run, or a folder of them and of records."""
        if not self._is_new(path):
            return
        if (path / "suite.json").is_file():
            self.read_suite(path, name)
        elif _any_of(RUN_FILES, path):
            self.read_run(Member(path, name))
        else:
            if _any_of(REMAINS, path):
                self.problem(name, HALF_WRITTEN)
            elif not any(path.iterdir()):
                self.problem(name, "is empty")
            for child in [*_records(path), *_folders(path)]:
                below = f"{name}/{child.name}"
                with self.unreadable(below):
                    (self.read_report if child.is_file() else self.read_folder)(child, below)

    def read_suite(self, path: Path, name: str) -> None:
        try:
            suite = read_json(path / "suite.json")
            if suite["format"] != SUITE_FORMAT:
                rule = f"has format {suite['format']!r}, this airmoe reads {SUITE_FORMAT}: left out"
                self.problem(f"{name}/suite.json", rule)
                return
            title, planned = str(suite["suite"]), list(suite["runs"])
        except WRONG_JSON as error:
            self.problem(f"{name}/suite.json", f"cannot be read ({_short(error)}): left out")
            return
        own = replace(self, runs=[])  # compared with each other before they count
        listed: set[str] = set()
        for index, plan in enumerate(planned):
            folder = plan.get("folder") if isinstance(plan, dict) else None
            if not is_name(folder) or folder in listed:
                rule = f"runs[{index}].folder is {folder!r}, no name of its own"
                self.problem(f"{name}/suite.json", f"{rule}: left out")
                continue
            listed.add(folder)
            member = Member(path / folder, f"{name}/{folder}", title, plan)
            with self.unreadable(member.name):
                own.read_member(member)
        self.runs += self._of_one_length_and_corpus(own.runs)
        for child in _folders(path):
            if child.name not in listed and _any_of(RUN_FILES + REMAINS, child):
                self.problem(f"{name}/{child.name}", "is not in suite.json: left out")

    def _of_one_length_and_corpus(self, runs: list[Run]) -> list[Run]:
        """A suite has one length and one corpus (rule E): keep what most of its runs have."""
        keys = [key_of(run) for run in runs]
        common = Counter(keys).most_common(1)[0][0] if keys else None
        for run, key in zip(runs, keys, strict=True):
            if key != common:
                pairs = ((getattr(key, part), getattr(common, part)) for part in vars(key))
                found = ", ".join(f"{one} instead of {two}" for one, two in pairs if one != two)
                rule = f"{Rule.REST}: {found} as in the rest of its suite: left out"
                self.problem(run.name, rule)
        return [run for run, key in zip(runs, keys, strict=True) if key == common]

    def read_member(self, member: Member) -> None:
        """A run of a suite, which may have crashed or not begun."""
        path = member.path
        self.seen.add(path.resolve())
        failed = SuiteFolder(path.parent).failure(path.name)
        if failed.is_file() and not _is_finished(member):
            try:
                crash = read_json(failed)
                reason = f"{crash['message']} (exit code {crash['code']})"
            except WRONG_JSON as error:
                reason = f"its message cannot be read ({_short(error)})"
            self.problem(member.name, f"crashed{_progress(path)}: {reason}")
        elif not path.is_dir():
            self.problem(member.name, "has not begun")
        else:
            self.read_run(member)

    def read_run(self, member: Member) -> None:
        path, name = member.path, member.name
        if not any(path.iterdir()):
            self.problem(name, "is empty")
            return
        if not (path / "run.json").is_file():
            self.problem(name, f"{HALF_WRITTEN}{_progress(path)}")
            return
        try:
            config = open_run(path).config
        except (ConfigError, *WRONG_JSON) as error:
            self.problem(name, str(error).replace(str(path / "run.json"), "run.json"))
            return
        if not (path / "result.json").is_file():
            self.problem(name, f"is not finished: no result.json{_progress(path, config)}")
            return
        try:
            about = read_json(path / "run.json") | {"config": config.to_json()}
            run = finished_run(member, about, read_json(path / "result.json"))
        except WRONG_JSON as error:
            self.problem(name, f"result.json cannot be read ({_short(error)}): left out")
            return
        self.runs.append(replace(run, usage=self._usage(path / USAGE, run)))

    def _usage(self, path: Path, run: Run) -> ExpertMap | None:
        """The map of a run that wrote one; an unreadable file costs the map, not the run."""
        if not path.is_file():
            return None
        try:
            return read_usage(path, run.config)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            self.problem(run.name, f"{path.name} cannot be read ({_short(error)}): no usage map")
            return None


def is_name(text: object) -> TypeGuard[str]:
    """Whether it is a plain name for a folder; a path from a file could lead anywhere."""
    return isinstance(text, str) and text not in ("", "..") and text == PurePosixPath(text).name


def _any_of(patterns: Sequence[str], path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in patterns)


def _records(path: Path) -> list[Path]:
    files = (file for file in path.glob("*.json") if not file.name.startswith("."))
    return sorted(file for file in files if file.is_file())


def _folders(path: Path) -> Iterator[Path]:
    for child in sorted(path.iterdir()):
        hidden = child.name.startswith((".", "checkpoint-")) or child.name in NEVER_RUNS
        if child.is_dir() and not hidden:
            yield child


def _is_finished(member: Member) -> bool:
    """Whether it has a result with the planned settings; then no recorded failure matters."""
    try:
        return read_json(member.path / "result.json")["config"] == member.plan.get("config")
    except (OSError, *WRONG_JSON):
        return False


def _progress(path: Path, config: RunConfig | None = None) -> str:
    """How far an unfinished run came, from its log; its last line may be torn."""
    try:
        lines = (path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ", nothing logged"
    steps = None if config is None else config.training.steps
    of_all = "" if steps is None else f" of {steps}"
    for line in reversed(lines):
        try:
            values = parse_json(line)
            return f", step {values['step']}{of_all}, loss {values['loss']:.3f}"
        except (ValueError, KeyError, TypeError):
            continue
    return ", nothing logged"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
