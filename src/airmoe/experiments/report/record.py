"""What a report keeps of a finished run: small enough to commit, enough to draw everything again.

`report.json` holds all runs of a report, `FOLDER/<suite, or single>/<run>.json` a single one; both
have the same format.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from airmoe.errors import ConfigError
from airmoe.files import read_json, write_json
from airmoe.training import RunConfig

FORMAT = 3  # before: runs with the balance loss of old, too

# field -> values, None where a line lacks it; a field that no line has is missing
Curve = dict[str, list[float | None]]
Numbers = dict[str, float | None]

LARGEST = 1e100  # nothing that is measured comes near, and its square is still a number
# What reports read of the fields whose names are free.
READ = {
    "recipe": ("corpus",),
    "versions": ("torch",),
    "git": ("commit",),
    "machine": ("count", "device"),
    "parameters": ("total", "active"),
    "best": ("perplexity",),
    "test": ("perplexity",),
    "evaluations": ("step",),
    "training": ("step",),
}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is what an annotation says."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if kind is float:
        return isinstance(value, int | float) and abs(value) < LARGEST
    return kind is Any or isinstance(value, kind)


class Checked:
    """A dataclass whose fields come from a file that somebody may have changed."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if not fits(value := getattr(self, name), kind):
                raise ValueError(f"{name} holds something else than a report wrote")
            for key in READ.get(name, ()) if value is not None else ():
                if key not in value:
                    raise ValueError(f"{name} lacks {key!r}")


@dataclass(frozen=True, kw_only=True)
class ExpertMap(Checked):
    """Tokens per expert as a picture (usage.py): of the first MoE layer at the best checkpoint."""

    shape: list[int]  # rows and columns of the whole grid
    levels: str  # the kept part of it: uint8 on a log scale, zlib, base64
    structure: float | None  # share of the variance of log counts that rows and columns explain


@dataclass(frozen=True, kw_only=True)
class Run(Checked):
    """A finished run. Numbers that are missing or not finite are None."""

    name: str  # its folder, below the one the report was asked for
    suite: str | None
    variant: str
    seed: int
    config: dict[str, Any]
    data_sha256: str
    recipe: dict[str, Any]  # of the text, as its prepared folder has it
    versions: dict[str, str]
    git: dict[str, Any]
    machine: dict[str, Any]
    parameters: dict[str, int]  # total and active
    best: Numbers  # the evaluation with the lowest loss
    tokens: int
    tokens_per_second: float | None
    evaluations: Curve
    training: Curve
    usage: ExpertMap | None
    test: Numbers | None  # the best checkpoint on the test split
    peak_memory_gib: float | None
    whole_seconds: float | None  # from start to end: compilers and evaluations too

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.settings.preset, str):  # raises where another version wrote them
            raise ValueError("its preset is no name")
        if not self.perplexity > 0:
            raise ValueError("its best evaluation has no finite perplexity")

    @property
    def method(self) -> str:
        """The variant that its settings make, whatever a table calls it."""
        return method_of(self.config["model"])

    @property
    def perplexity(self) -> float:
        """The lowest; a run without one is not read."""
        return self.best["perplexity"] or 0.0

    @property
    def settings(self) -> RunConfig:
        return RunConfig.from_json(self.config)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, **asdict(record)})


def read_record(path: Path) -> Record:
    """What `write_record` wrote; raises ConfigError where it is something else."""
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, that of this airmoe {FORMAT}")
        return Record(runs=[_run(one) for one in values["runs"]], problems=values["problems"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = "Write it again from its runs."
        rule = f"cannot be read ({type(error).__name__}: {error})"
        raise ConfigError("record", str(path), rule, remedy) from error


def _run(values: dict[str, Any]) -> Run:
    usage = values["usage"]
    return Run(**{**values, "usage": None if usage is None else ExpertMap(**usage)})
