"""What a study leaves: recall.json, small enough to commit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from airmoe.training.config import RunConfig

FORMAT = 1
KIND = "recall"
FILE = "recall.json"  # in the folder of a run, unless asked otherwise

Stage = Literal["own", "fitted", "pooled_spread", "cell_spread", "used", "used_batch"]


def step_tokens(run: RunConfig) -> int:
    return run.training.batch_size * run.data.block_size


def batch_tokens(tokens_per_step: int, num_codewords: int) -> int:
    """Of each cell in `used_batch`: as many as it has in one training step on average."""
    return max(1, tokens_per_step // num_codewords)


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

    @property
    def sizes(self) -> list[int]:
        """Those of the shortlists, which all stages have."""
        return sorted({row.shortlist_size for row in self.rows})

    def stages(self) -> list[list[Row]]:
        """The rows of each stage, with its number of codewords and probes."""
        found: dict[tuple[Stage, int, int], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.stage, row.num_codewords, row.probes), []).append(row)
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class RecallStudy:
    """What was measured, on which run, text and machine."""

    run: str
    checkpoint: str
    config: dict[str, Any]
    data: str | None  # name of the prepared text where it is not the run's own
    data_sha256: str
    versions: dict[str, str]
    git: dict[str, Any]
    machine: dict[str, Any]
    seed: int
    fit_tokens: int  # of the training split
    tokens: int  # of the validation split
    layers: list[LayerRows]

    @property
    def settings(self) -> RunConfig:
        return RunConfig.from_json(self.config)

    @property
    def tokens_per_step(self) -> int:
        return step_tokens(self.settings)

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "format": FORMAT, **asdict(self)}
