"""What a report keeps of a finished run: small enough to commit, enough to draw everything again.

`report.json` holds all runs of a report, `FOLDER/<suite, or single>/<run>.json` a single one; both
have the same format.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.files import read_as, write_json
from airmoe.training import RunConfig

FORMAT = 3  # 2 also held runs with the old balance loss

Number = int | float | None  # with `int`, files keep 360 from turning into 360.0
# field -> values, None where a line lacks it; a field that no line has is missing
Curve = dict[str, list[Number]]
Numbers = dict[str, Number]

LARGEST = 1e100  # far above anything measured; its square is still finite
# Keys that a report needs in fields which may have any.
READ = {
    "recipe": ("corpus",),
    "versions": ("torch",),
    "git": ("commit",),
    "machine": ("count", "device"),
    "parameters": ("total", "active"),
    "best": ("perplexity",),
    "test": ("perplexity",),
}


@dataclass(frozen=True, kw_only=True)
class ExpertMap:
    """Tokens per expert as a picture (usage.py): of the first MoE layer at the best checkpoint."""

    shape: list[int]  # rows and columns of the whole grid
    levels: str  # the kept part of it: uint8 on a log scale, zlib, base64
    structure: Number  # share of the variance of log counts that rows and columns explain


@dataclass(frozen=True, kw_only=True)
class Run:
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
    tokens_per_second: Number
    evaluations: Curve
    training: Curve
    usage: ExpertMap | None
    test: Numbers | None  # the best checkpoint on the test split
    peak_memory_gib: Number
    whole_seconds: Number  # from start to end: compilers and evaluations too

    def __post_init__(self) -> None:
        """Refuse values that a file changed by hand may hold; types are checked already."""
        for name, keys in READ.items():
            values = getattr(self, name)
            if missing := [key for key in keys if values is not None and key not in values]:
                raise ValueError(f"{name} lacks {missing[0]!r}")
        for name, values in asdict(self).items():
            _check_numbers(values, name)
        try:
            preset = self.settings.preset
        except ConfigError as error:  # another version wrote them; read_as adds the file
            raise ValueError(str(error)) from error
        if not isinstance(preset, str):
            raise ValueError("its preset is no name")
        if not self.perplexity > 0:
            raise ValueError("its best evaluation has no finite perplexity")

    @property
    def method(self) -> str:
        """The variant that its settings describe, whatever a table calls it."""
        return method_of(self.config["model"])

    @property
    def perplexity(self) -> float:
        """The lowest of the run, always positive."""
        return self.best["perplexity"] or 0.0

    @property
    def settings(self) -> RunConfig:
        return RunConfig.from_json(self.config)


@dataclass(frozen=True, kw_only=True)
class Record:
    """All runs that were found, and a line for everything that was left out."""

    format: int = FORMAT
    runs: list[Run]
    problems: list[str]


def method_of(model: dict[str, Any]) -> str:
    """The variant that a model's settings describe, for runs outside a suite."""
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
    write_json(path, asdict(record))


def read_record(path: Path) -> Record:
    """What `write_record` wrote; raises ConfigError where it is something else."""
    return read_as(Record, path, "Write it again from its runs.", field="record", check=_check)


def _check(values: Any) -> None:
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise ValueError(f"its format is {found}, that of this airmoe {FORMAT}")


def _check_numbers(values: Any, name: str) -> None:
    """Raise for a number that is not finite or too large to be a measurement."""
    if isinstance(values, dict | list):
        for one in values.values() if isinstance(values, dict) else values:
            _check_numbers(one, name)
    elif isinstance(values, int | float) and not abs(values) < LARGEST:
        raise ValueError(f"{name} holds a number that no run has")
