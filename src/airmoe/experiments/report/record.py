"""What a finished run leaves behind: small enough to commit, enough to draw everything again.

`report.json` holds all runs of a report, `FOLDER/<suite, or single>/<run>.json` a single one; both
have the same format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from airmoe.errors import ConfigError
from airmoe.experiments.report.fields import Count, Natural, brief, from_json, is_number
from airmoe.experiments.report.names import method_of
from airmoe.experiments.report.usage import ExpertMap
from airmoe.files import read_json, write_json
from airmoe.losses import BALANCE
from airmoe.training import RunConfig

FORMAT = 2
OLD_BALANCE = "f sums to 1"  # the balance loss of runs that do not name theirs
MOST_POINTS = 600  # of a curve: ten passes of `small`, a point every 100 steps, are whole
SINGLE = "single"  # the folder of runs of no suite

ROUTING_FIELDS = (
    "overlap",
    "mass_recall",
    "mass_recall_bound",
    "dead_experts",
    "entropy",
    "codeword_perplexity",
    "unlisted_experts",
)
EVALUATION_FIELDS = (
    *("step", "tokens", "seconds", "flops", "executed_flops", "loss", "perplexity"),
    *ROUTING_FIELDS,
)
# The loss is drawn nowhere: it is for readers who ask of a record whether training was smooth.
TRAINING_FIELDS = ("step", "tokens", "tokens_per_second", "loss", *ROUTING_FIELDS, "staleness")
# Settings may leave these to their defaults, but reports read them.
READ_OPTIONS = {"data": ("folder",), "training": ("epochs", "steps", "precision", "seed")}

# field -> values, None where a line lacks it; a field that no line has is missing
Curve = dict[str, list[float | None]]
Numbers = dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How large the model is."""

    total: Count
    active: Count


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run. Numbers that are missing or not finite are None."""

    name: str  # its folder, below the one the report was asked for
    suite: str | None
    variant: str
    seed: Natural
    config: dict[str, Any]
    data_sha256: str | None
    versions: dict[str, str]
    git: dict[str, Any]
    machine: dict[str, Any]
    parameters: Parameters
    best: Numbers  # the evaluation with the lowest loss
    tokens: Count
    tokens_per_second: float | None
    evaluations: Curve
    training: Curve
    usage: ExpertMap | None
    test: Numbers | None  # the best checkpoint on the test split
    peak_memory_gib: float | None
    whole_seconds: float | None  # from start to end: compilers and evaluations too
    recipe: dict[str, Any] | None  # of the text, as its prepared folder had it
    balance: str  # what the choice frequencies of its balance loss sum to

    def check(self, path: str) -> None:
        """What types do not say."""
        _check_config(f"{path}.config", self.config)
        _check_positive(f"{path}.best.perplexity", self.best.get("perplexity"))
        for name in ("evaluations", "training"):
            _check_curve(f"{path}.{name}", getattr(self, name))
        for name, kind in (("corpus", str), ("split_rule", str), ("max_tokens", Count)):
            value = None if self.recipe is None else self.recipe.get(name)
            if self.recipe is not None and (name != "max_tokens" or value is not None):
                from_json(kind, value, f"{path}.recipe.{name}")

    @property
    def method(self) -> str:
        """What its model is, however a table names it."""
        return method_of(self.config["model"])

    @property
    def convention(self) -> str | None:
        """Of its balance losses; None where it makes no difference.

        That is without such a loss, and where a token has one expert or one list only.
        """
        model = self.settings.model_config(vocab_size=2, eos_id=1)  # any vocabulary will do
        lists = getattr(model.router_config(), "num_selected_clusters", 1)
        experts_count = model.load_balance_weight > 0 and model.num_experts_per_tok > 1
        lists_count = model.shortlist_balance_weight > 0 and lists > 1
        matters = bool(model.moe_layers) and (experts_count or lists_count)
        return self.balance if matters else None

    @property
    def settings(self) -> RunConfig:
        return RunConfig.from_json(self.config)


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that was found: runs, and a line for everything that is not among them."""

    runs: list[Run]
    problems: list[str]


def write_record(record: Record, path: Path) -> None:
    write_json(path, {"format": FORMAT, **asdict(record)})


def read_record(path: Path, name: str | None = None) -> Record:
    """What `write_record` wrote; raises ConfigError where it is something else.

    A garbled run is left out, with a line that begins with `name`, by default the file's.
    """
    values = _json_of(path)
    runs, problems = [], [_one_line(line) for line in values["problems"]]
    for place, one in enumerate(values["runs"]):
        try:
            runs.append(from_json(Run, one, f"runs[{place}]"))
        except ConfigError as error:  # nobody should mend numbers by hand, whatever the rule was
            remedy = "The run is left out: write its record again."
            told = ConfigError(error.field, brief(error.value), error.rule, remedy)
            problems.append(f"{name or path.name}: {told}")
    return Record(runs=runs, problems=problems)


def _json_of(path: Path) -> dict[str, Any]:
    """Of this format, with its lists."""
    again = "Write it again from its runs."
    try:
        values = read_json(path)
        found = values["format"]
    except (ValueError, KeyError, TypeError) as error:
        rule = f"must be a report.json of `airmoe report` ({error})"
        raise ConfigError("report", path.name, rule, again) from error
    if found != FORMAT:
        rule = f"must be {FORMAT}, the format of this airmoe"
        raise ConfigError("report.format", brief(found), rule, again)
    for part in ("runs", "problems"):
        if not isinstance(values.get(part), list):
            rule = f"lacks or misnames a field ({part} must be a list)"
            raise ConfigError("report", path.name, rule, again)
    return values


def _one_line(problem: object) -> str:
    """JSON can name halves of characters, which no file takes."""
    return " ".join(str(problem).encode(errors="backslashreplace").decode().split())


def _check_config(path: str, value: dict[str, Any]) -> None:
    try:
        RunConfig.from_json(value)
    except ConfigError as error:
        field = f"{path}.{error.field.removeprefix('config').lstrip('.')}".rstrip(".")
        raise ConfigError(field, error.value, error.rule, "") from error
    for section, names in READ_OPTIONS.items():
        for name in names:
            if name not in value[section]:
                raise ConfigError(f"{path}.{section}.{name}", None, "must be given", "")


def _check_positive(path: str, value: float | None) -> None:
    if value is None:
        raise ConfigError(path, value, "must be a finite number", "")
    if value <= 0:
        raise ConfigError(path, value, "must be above 0, others are divided by it", "")


def _check_curve(path: str, curve: Curve) -> None:
    """Lists of equal length, one of them the steps."""
    if "step" not in curve:
        raise ConfigError(f"{path}.step", None, "must be given", "")
    for name, column in curve.items():
        if len(column) != len(curve["step"]):
            rule = f"must be as many as steps, {len(curve['step'])}"
            raise ConfigError(f"{path}.{name}", len(column), rule, "")
    for place, one in enumerate(curve.get("perplexity", [])):
        if one is not None:
            _check_positive(f"{path}.perplexity[{place}]", one)


def curve(lines: Sequence[dict[str, Any]], fields: Sequence[str]) -> Curve:
    """The fields of log lines as columns, thinned evenly; first and last line stay."""
    kept = lines
    if len(lines) > MOST_POINTS:
        last = len(lines) - 1
        kept = [lines[round(place * last / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]
    columns = {field: [number(line.get(field)) for line in kept] for field in fields}
    return {
        field: values
        for field, values in columns.items()
        if field == "step" or any(value is not None for value in values)
    }


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if is_number(value) else None


def is_name(text: object) -> TypeGuard[str]:
    """Whether a folder can be called so: what a file from elsewhere says may lead anywhere."""
    return isinstance(text, str) and text not in ("", "..") and text == PurePosixPath(text).name


def file_of(run: Run) -> PurePosixPath:
    """`main/air-seed42.json`: a run may belong to two suites, and has a file in each."""
    suite = run.suite or SINGLE
    if not is_name(suite):
        rule = "must be a name, because its records get a folder"
        raise ConfigError("records", suite, rule, "Rename the suite.")
    return PurePosixPath(suite, f"{PurePosixPath(run.name).name}.json")


def plan_records(runs: Sequence[Run], folder: Path) -> dict[Path, Run]:
    """Where each run goes; raises where a file would hold another run than before, or two.

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


def write_records(planned: Mapping[Path, Run]) -> None:
    """The files of `plan_records`."""
    for path, run in planned.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(Record(runs=[run], problems=[]), path)


def _is_same(run: Run, other: Run) -> bool:
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
    return len(found) == 1 and _is_same(run, found[0])


def _taken(path: Path, run: Run, rule: str) -> ConfigError:
    remedy = "Rename one of the run folders, or give another folder for the records."
    return ConfigError("records", str(path), f"cannot take {run.name}: {rule}", remedy)


def is_current(run: Run) -> bool:
    """Whether its balance loss is today's, or it makes no difference."""
    return run.convention in (None, BALANCE)
