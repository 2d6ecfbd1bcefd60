"""Maps of expert usage (Fig. 4), and the artefact in them.

A map shows experts in the order in which their router shares weights: PEER's sub-keys are rows and
columns, a hierarchical router's clusters are rows. Where a router couples neighbours, rows or
columns are bright or dark as a whole; `structure` measures that.
"""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from safetensors.numpy import load_file

from airmoe.errors import ConfigError

Natural = Annotated[int, 0]  # whole numbers, with their smallest value
Count = Annotated[int, 1]

LARGEST_SIDE = 128
DECADES = 3  # levels 1 to 255 reach from 10^-3 to 10^3 times the mean; 0 is no token at all
LEVELS = 254


@dataclass(frozen=True, kw_only=True)
class ExpertMap:
    """Tokens per expert as a picture, and how much of it rows and columns explain.

    Of the first MoE layer, at the best checkpoint, over the validation text.
    """

    layer: Natural
    shape: list[Count]  # of the whole grid
    steps: list[Count]  # one row (column) in so many is kept
    # The kept grid: uint8 on a log scale of count / mean, zlib, base64. None: only another seed's.
    levels: str | None
    structure: float | None  # share of the variance of log counts; None: a grid of one row
    structure_by_chance: float | None  # its expectation when experts are shuffled

    def check(self, path: str) -> None:
        """Raise unless the kept grid is one of this shape."""
        for name in ("shape", "steps"):
            if len(getattr(self, name)) != 2:
                raise ConfigError(f"{path}.{name}", "list", "must be a list of 2", "")
        try:
            if self.levels is not None:
                kept_levels(self)
        except ValueError as error:
            rule = f"must be a map of its shape ({error})"
            raise ConfigError(f"{path}.levels", self.levels, rule, "") from error


def read_usage(path: Path, config: dict[str, Any]) -> ExpertMap | None:
    """The map of a run's usage.safetensors; None where it has no experts."""
    tensors = load_file(path)
    layers = sorted(int(name.partition(".")[2]) for name in tensors if name.startswith("experts."))
    if not layers:
        return None
    counts = tensors[f"experts.{layers[0]}"]  # [E]
    return expert_map(counts.reshape(grid_shape(counts.size, config["model"])), layers[0])


def grid_shape(num_experts: int, model: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns: clusters and their experts, else as square as the number allows."""
    clusters = model.get("router_options", {}).get("num_clusters")
    if model.get("router") == "hierarchical" and clusters and num_experts % clusters == 0:
        return clusters, num_experts // clusters
    side = math.isqrt(num_experts)
    while num_experts % side:
        side -= 1
    return side, num_experts // side


def expert_map(grid: np.ndarray, layer: int = 0) -> ExpertMap:
    """A grid of counts, quantised; too large a side keeps evenly spaced rows (or columns)."""
    rows, columns = grid.shape
    steps = [math.ceil(side / LARGEST_SIDE) for side in grid.shape]
    levels = quantised(grid)[:: steps[0], :: steps[1]]
    packed = zlib.compress(np.ascontiguousarray(levels).tobytes(), 9)
    proper = min(rows, columns) > 1
    return ExpertMap(
        layer=layer,
        shape=[rows, columns],
        steps=steps,
        levels=base64.b64encode(packed).decode("ascii"),
        structure=structure(grid) if proper else None,
        structure_by_chance=(rows + columns - 2) / (rows * columns - 1) if proper else None,
    )


def quantised(grid: np.ndarray) -> np.ndarray:
    """Counts over their mean, on a log scale from 1 to 255; 0 where there is no token."""
    mean = grid.mean()
    if not mean:
        return np.zeros(grid.shape, np.uint8)
    with np.errstate(divide="ignore"):
        decades = np.log10(grid / mean).clip(-DECADES, DECADES)
    levels = 1 + np.rint((decades + DECADES) * LEVELS / (2 * DECADES))
    return np.where(grid > 0, levels, 0).astype(np.uint8)


def kept_levels(found: ExpertMap) -> np.ndarray:
    """The kept grid of levels; raises ValueError where the text holds no such grid."""
    assert found.levels is not None
    kept = [-(-side // step) for side, step in zip(found.shape, found.steps, strict=True)]
    unpacking = zlib.decompressobj()
    try:  # a few bytes can unpack to gigabytes: one more than needed shows it
        unpacked = unpacking.decompress(base64.b64decode(found.levels), math.prod(kept) + 1)
    except (zlib.error, OverflowError) as error:
        raise ValueError(str(error)) from error
    return np.frombuffer(unpacked, np.uint8).reshape(kept)


def relative_usage(found: ExpertMap) -> np.ndarray:
    """The kept grid as count / mean, NaN where there was no token."""
    levels = kept_levels(found)
    decades = (levels.astype(float) - 1) * 2 * DECADES / LEVELS - DECADES
    return np.where(levels > 0, 10.0**decades, np.nan)


def structure(grid: np.ndarray) -> float | None:
    """Share of the variance of log counts that the means of rows and columns explain.

    1 for a product of a row factor and a column factor. Shuffled experts give (R + C - 2) of
    R C - 1 degrees of freedom on average. Half a token stands for none. None without variance.
    """
    logs = np.log(np.maximum(grid, 0.5))
    total = ((logs - logs.mean()) ** 2).sum()
    if total < 1e-12 * logs.size:
        return None
    rows, columns = logs.mean(axis=1, keepdims=True), logs.mean(axis=0, keepdims=True)
    left = ((logs - rows - columns + logs.mean()) ** 2).sum()
    return float(1 - left / total)
