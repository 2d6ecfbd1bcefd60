"""What a report keeps of a run: small enough to commit, and enough to draw everything again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.json_fields import brief, is_number
from airmoe.experiments.report.names import method_of
from airmoe.experiments.report.run_checks import check_run
from airmoe.experiments.report.usage import CellUsage, ExpertMap, Usage
from airmoe.files import read_json, write_json
from airmoe.training import RunConfig

FORMAT = 1
OLD_BALANCE = "f sums to 1"  # of records that do not say
MOST_POINTS = 600  # of a curve: ten passes of `small`, a point every 100 steps, are whole

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
    "step",
    "tokens",
    "seconds",
    "flops",
    "executed_flops",
    "loss",
    "perplexity",
    *ROUTING_FIELDS,
)
# The loss is drawn nowhere: it is for those who ask of a record whether training was smooth.
TRAINING_FIELDS = ("step", "tokens", "tokens_per_second", "loss", *ROUTING_FIELDS, "staleness")

# field -> values, None where a line lacks it; a field that no line has, or older files, is missing
Curve = dict[str, list[float | None]]
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run. Numbers that are missing or not finite are None."""

    name: str  # its folder, below the one the report was asked for
    suite: str | None
    variant: str
    seed: int
    config: dict[str, Any]
    data_sha256: str | None
    versions: dict[str, str]
    git: dict[str, Any]
    machine: dict[str, Any]
    parameters: dict[str, int]
    best: dict[str, float | None]  # the evaluation with the lowest loss
    tokens: int
    tokens_per_second: float | None
    evaluations: Curve
    training: Curve
    usage: Usage | None
    # Files older than these lack them.
    test: dict[str, float | None] | None = None  # the best checkpoint on the test split
    peak_memory_gib: float | None = None
    whole_seconds: float | None = None  # from start to end: compilers and evaluations too
    recipe: dict[str, Any] | None = None  # of the text, as its prepared folder had it
    balance: str | None = None  # convention of its balance losses; None: OLD_BALANCE

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
        router = model.router_config()
        lists = getattr(router, "num_selected_clusters", getattr(router, "probes", 1))
        experts_count = model.load_balance_weight > 0 and model.num_experts_per_tok > 1
        lists_count = model.shortlist_balance_weight > 0 and lists > 1
        matters = bool(model.moe_layers) and (experts_count or lists_count)
        return (self.balance or OLD_BALANCE) if matters else None

    @property
    def settings(self) -> RunConfig:
        return RunConfig.from_json(self.config)


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that was found: runs, a line for everything that is not among them."""

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
            runs.append(_run(f"runs[{place}]", one))
        except ConfigError as error:
            problems.append(f"{name or path.name}: {error}")
    return Record(runs=runs, problems=problems)


def _json_of(path: Path) -> dict[str, Any]:
    """Of the format of reports, with its lists."""
    try:
        values = read_json(path)
        found = values["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "report",
            path.name,
            f"must be a report.json of `airmoe report` ({error})",
            "Write it again from its runs.",
        ) from error
    if found != FORMAT:
        raise ConfigError(
            "report.format",
            brief(found),
            f"must be {FORMAT}, the format of this airmoe",
            "Write it again from its runs.",
        )
    for part in ("runs", "problems"):
        if not isinstance(values.get(part), list):
            rule = f"lacks or misnames a field ({part} must be a list)"
            raise ConfigError("report", path.name, rule, "Write it again.")
    return values


def _one_line(problem: object) -> str:
    """JSON can name halves of characters, which no file takes."""
    return " ".join(str(problem).encode(errors="backslashreplace").decode().split())


def _run(path: str, values: Any) -> Run:
    try:
        check_run(path, values)
    except ConfigError as error:  # nobody should mend numbers by hand, whatever the rule was
        remedy = "The run is left out: write its record again."
        raise ConfigError(error.field, brief(error.value), error.rule, remedy) from error
    usage, found = None, values["usage"]
    if found is not None:
        cells = found["cells"]
        usage = Usage(
            layer=found["layer"],
            experts=ExpertMap(**found["experts"]),
            cells=None if cells is None else CellUsage(**cells),
        )
    return Run(**{**values, "usage": usage})


def curve(lines: Sequence[Line], fields: Sequence[str]) -> Curve:
    """The fields of log lines as columns, thinned evenly; first and last line stay."""
    kept = [lines[index] for index in thinned(len(lines))]
    columns = {field: [number(line.get(field)) for line in kept] for field in fields}
    return {
        field: values
        for field, values in columns.items()
        if field == "step" or any(value is not None for value in values)
    }


def thinned(length: int) -> list[int]:
    """At most MOST_POINTS indices of `length`, evenly spread."""
    if length <= MOST_POINTS:
        return list(range(length))
    return [round(index * (length - 1) / (MOST_POINTS - 1)) for index in range(MOST_POINTS)]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if is_number(value) else None
