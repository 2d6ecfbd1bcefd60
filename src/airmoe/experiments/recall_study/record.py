"""What a study leaves: recall.json, small enough to commit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeGuard, get_args

from airmoe.errors import ConfigError

FORMAT = 1
KIND = "recall"
FILE = "recall.json"  # in the folder of a run, unless asked otherwise

Stage = Literal["own", "fitted", "pooled_spread", "cell_spread", "used", "used_16"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One coarse stage with one size of shortlist."""

    stage: Stage
    num_codewords: int
    shortlist_size: int
    probes: int
    overlap: float  # share of exact routing's K experts that its lists hold
    unlisted_experts: float  # share of experts in no list
    cosine: float | None  # of token and nearest codeword, the mean; None with several probes
    # Products of length D per training token; None where lists are built in another way.
    products_every_step: float | None
    products_every_16_steps: float | None

    def __post_init__(self) -> None:
        if self.stage not in get_args(Stage):
            raise TypeError(f"no stage {self.stage!r}")

    @property
    def name(self) -> str:
        """`own-g1024-m2048-p1`, for words about it."""
        return f"{self.stage}-g{self.num_codewords}-m{self.shortlist_size}-p{self.probes}"


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """All rows of one MoE layer, the router as it is first."""

    layer: str  # number of the decoder layer
    num_experts: int
    top_k: int
    shortlist_size: int  # of the router as it is
    rows: list[Row]


@dataclass(frozen=True, kw_only=True)
class RecallStudy:
    """What was measured, on which run, text and machine."""

    run: str
    checkpoint: str
    config: dict[str, Any]
    data_sha256: str
    versions: dict[str, str]
    git: dict[str, Any]
    machine: dict[str, Any]
    seed: int
    fit_tokens: int  # of the training split
    tokens: int  # of the validation split
    layers: list[LayerRows]

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "format": FORMAT, **asdict(self)}


def is_study(values: object) -> TypeGuard[dict[str, Any]]:
    """Whether the JSON of a file is that of a study."""
    return isinstance(values, dict) and values.get("kind") == KIND


def study_from_json(values: dict[str, Any]) -> RecallStudy:
    """What `to_json` gave; raises ConfigError where it is anything else."""
    fields = {name: value for name, value in values.items() if name not in ("kind", "format")}
    if values["format"] != FORMAT:
        raise ConfigError(
            "recall.format",
            values["format"],
            f"must be {FORMAT}, the format of this airmoe",
            "Measure again: airmoe recall RUN.",
        )
    try:
        layers = [
            LayerRows(**{**one, "rows": [Row(**row) for row in one["rows"]]})
            for one in fields["layers"]
        ]
        return RecallStudy(**{**fields, "layers": layers})
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "recall",
            values.get("run"),
            f"lacks or misnames a field ({error})",
            "Measure again: airmoe recall RUN.",
        ) from error
