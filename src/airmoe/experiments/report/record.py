"""What a report keeps of a finished run: small enough to commit, enough to draw everything again.

`report.json` holds all runs of a report, `FOLDER/<suite, or single>/<run>.json` a single one; both
have the same format. People keep, share and change these files, so they are read strictly: every
refusal names its field.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from airmoe.config import check_count
from airmoe.errors import ConfigError
from airmoe.experiments.report.usage import Count, ExpertMap, Natural
from airmoe.files import can_be_written, read_json, write_json
from airmoe.losses import BALANCE
from airmoe.training import RunConfig

FORMAT = 2
OLD_BALANCE = "f sums to 1"  # the balance loss of runs that do not name theirs

# Settings may leave these to their defaults, but reports read them.
READ_OPTIONS = {"data": ("folder",), "training": ("epochs", "steps", "precision", "seed")}

LARGEST = 1e100  # a spread over seeds squares its numbers; nothing measured comes near
MOST_BITS = 64  # of an integer: products of three of them still fit in a line
DEEPEST = 8  # objects in objects
LONGEST = 60  # characters of a value in a message

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
        """Rules beyond the types."""
        _check_config(f"{path}.config", self.config)
        _require(self.best.get("perplexity") is not None, f"{path}.best.perplexity", None, NUMBER)
        _check_positive(f"{path}.best.perplexity", self.best["perplexity"])
        for name in ("evaluations", "training"):
            _check_curve(f"{path}.{name}", getattr(self, name))
        if self.recipe is not None:
            _check_text(f"{path}.recipe.corpus", self.recipe.get("corpus"))
            _check_text(f"{path}.recipe.split_rule", self.recipe.get("split_rule"))
            if (tokens := self.recipe.get("max_tokens")) is not None:
                check_count(f"{path}.recipe.max_tokens", tokens)

    @property
    def method(self) -> str:
        """The variant that its settings make, whatever a table calls it."""
        return method_of(self.config["model"])

    @property
    def perplexity(self) -> float:
        """The lowest; `check` makes sure that there is one."""
        found = self.best["perplexity"]
        assert found is not None
        return found

    @property
    def settings(self) -> RunConfig:
        return RunConfig.from_json(self.config)

    @property
    def convention(self) -> str | None:
        """The convention of its balance losses; None where it makes no difference.

        That is without such a loss, and where a token has only one expert or one list.
        """
        model = self.settings.model_config(vocab_size=2, eos_id=1)  # any vocabulary will do
        lists = getattr(model.router_config(), "num_selected_clusters", 1)
        experts_count = model.load_balance_weight > 0 and model.num_experts_per_tok > 1
        lists_count = model.shortlist_balance_weight > 0 and lists > 1
        matters = bool(model.moe_layers) and (experts_count or lists_count)
        return self.balance if matters else None

    @property
    def is_current(self) -> bool:
        """Whether its balance loss is today's, or it makes no difference."""
        return self.convention in (None, BALANCE)


@dataclass(frozen=True, kw_only=True)
class Record:
    """All runs that were found, and a line for everything that was left out."""

    runs: list[Run]
    problems: list[str]


def method_of(model: dict[str, Any]) -> str:
    """The variant that a model's settings make, for runs outside a suite."""
    router, options = model.get("router", "air"), model.get("router_options") or {}
    if model.get("moe_layers") == []:
        return "dense"
    if model.get("experts") == "coarse":
        return "coarse"
    if router != "air":
        return "exact" if router == "topk" else router
    if options.get("gate") == "expert_choice":
        return "expert_choice"
    if options.get("codebook", "spherical") != "spherical":
        return options["codebook"]
    return "no_projection" if options.get("normalize_centroids") is False else "air"


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
        except ConfigError as error:
            # Not the rule's own remedy: nobody should repair numbers by hand.
            remedy = "The run is left out: write its record again."
            told = ConfigError(error.field, _brief(error.value), error.rule, remedy)
            problems.append(f"{name or path.name}: {told}")
    return Record(runs=runs, problems=problems)


def _json_of(path: Path) -> dict[str, Any]:
    """The JSON of a file of this format."""
    again = "Write it again from its runs."
    try:
        values = read_json(path)
        found = values["format"]
    except (ValueError, KeyError, TypeError) as error:
        rule = f"must be a report.json of `airmoe report` ({error})"
        raise ConfigError("report", path.name, rule, again) from error
    if found != FORMAT:
        rule = f"must be {FORMAT}, the format of this airmoe"
        raise ConfigError("report.format", _brief(found), rule, again)
    for part in ("runs", "problems"):
        if not isinstance(values.get(part), list):
            rule = f"lacks or misnames a field ({part} must be a list)"
            raise ConfigError("report", path.name, rule, again)
    return values


def _one_line(problem: object) -> str:
    """JSON can hold surrogates (halves of characters), which no file takes."""
    return " ".join(str(problem).encode(errors="backslashreplace").decode().split())


def _brief(value: object) -> object:
    """A value short enough for a message."""
    if isinstance(value, list | dict):
        return type(value).__name__
    text = value if isinstance(value, str) else str(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def is_number(value: object) -> TypeGuard[float]:
    """A finite number to calculate with; `math.isfinite` would raise for 400 digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST <= value <= LARGEST


NUMBER, GIVEN, TEXT = "must be a finite number", "must be given", "must be a text"


def _require(condition: bool, path: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(path, value, rule, "")


def from_json(kind: Any, value: Any, path: str) -> Any:
    """`value` as an object of the type `kind`; raises ConfigError where it is none.

    Known are dataclasses, lists, dicts by name, texts, whole and finite numbers, `X | None`, and
    `Any` for whatever can be shown. A dataclass may have a method `check(path)` for the rest.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # X | None
        return None if value is None else from_json(inner[0], value, path)
    if is_dataclass(kind):
        return _object(kind, value, path)
    if origin is list:
        _require(isinstance(value, list), path, value, "must be a list")
        return [from_json(inner[0], one, f"{path}[{place}]") for place, one in enumerate(value)]
    if origin is dict:
        _check_names(path, value)
        return {name: from_json(inner[1], one, f"{path}.{name}") for name, one in value.items()}
    if origin is Annotated:
        check_count(path, value, least=inner[1])
    elif kind is float:
        _require(is_number(value), path, value, NUMBER)
    elif kind is str:
        _check_text(path, value)
    else:
        _check_plain(path, value)
    return value


def _object(kind: Any, value: Any, path: str) -> Any:
    _check_names(path, value)
    types = get_type_hints(kind, include_extras=True)
    for name in value:
        _require(name in types, f"{path}.{name}", value[name], "is not a known field")
    for field in fields(kind):
        given = field.name in value or field.default is not MISSING
        _require(given, f"{path}.{field.name}", None, GIVEN)
    found = kind(
        **{name: from_json(types[name], one, f"{path}.{name}") for name, one in value.items()}
    )
    if check := getattr(found, "check", None):
        check(path)
    return found


def _check_names(path: str, value: Any) -> None:
    _require(isinstance(value, dict), path, value, "must be an object")
    for name in value:
        _check_text(path, name)


def _check_text(path: str, value: Any) -> None:
    _require(isinstance(value, str) and value != "", path, value, TEXT)
    _require(can_be_written(value), path, value, f"{TEXT} that a file can hold")


def _check_plain(path: str, value: Any, depth: int = DEEPEST) -> None:
    """Anything that can be shown: texts, numbers, flags, and lists and objects of them."""
    if isinstance(value, dict | list):
        _require(depth > 0, path, value, f"must not be nested deeper than {DEEPEST} times")
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(path, name, depth - 1)
            _check_plain(f"{path}.{name}", one, depth - 1)
    elif isinstance(value, str):
        if value:
            _check_text(path, value)
    elif isinstance(value, int):
        rule = f"must have less than {MOST_BITS} bits"
        _require(value.bit_length() < MOST_BITS, path, value, rule)
    else:
        _require(value is None or is_number(value), path, value, NUMBER)


def _check_config(path: str, value: dict[str, Any]) -> None:
    try:
        RunConfig.from_json(value)
    except ConfigError as error:
        field = f"{path}.{error.field.removeprefix('config').lstrip('.')}".rstrip(".")
        raise ConfigError(field, error.value, error.rule, "") from error
    for section, names in READ_OPTIONS.items():
        for name in names:
            _require(name in value[section], f"{path}.{section}.{name}", None, GIVEN)


def _check_positive(path: str, value: float | None) -> None:
    _require(value is None or value > 0, path, value, "must be above 0, others are divided by it")


def _check_curve(path: str, columns: Curve) -> None:
    """Lists of equal length, one of them the steps."""
    _require("step" in columns, f"{path}.step", None, GIVEN)
    steps = len(columns["step"])
    for name, column in columns.items():
        rule = f"must be as many as steps, {steps}"
        _require(len(column) == steps, f"{path}.{name}", len(column), rule)
    for place, one in enumerate(columns.get("perplexity", [])):
        _check_positive(f"{path}.perplexity[{place}]", one)
