"""Maps of expert usage (Fig. 4), and the artefact in them.

A map shows experts in the order in which their router shares weights: PEER's sub-keys are rows and
columns, a hierarchical router's clusters are rows. Where a router couples neighbours, rows or
columns are bright or dark as a whole; `structure` measures that.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.record import ExpertMap

LARGEST_SIDE = 128  # of what is kept: every second row (column) of 256, and so on
DECADES = 3  # levels 1 to 255 reach from 10^-3 to 10^3 times the mean; 0 is no token at all
LEVELS = 254


def read_usage(path: Path, model: dict[str, Any]) -> ExpertMap | None:
    """The map of a run's usage.safetensors; None where it has no experts."""
    tensors = load_file(path)
    layers = sorted(int(name.partition(".")[2]) for name in tensors if name.startswith("experts."))
    if not layers:
        return None
    counts = tensors[f"experts.{layers[0]}"]  # [E]
    return expert_map(counts.reshape(grid_shape(counts.size, model)))


def grid_shape(num_experts: int, model: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns: clusters and their experts, else as square as the number allows."""
    clusters = model.get("router_options", {}).get("num_clusters")
    if model.get("router") == "hierarchical" and clusters and num_experts % clusters == 0:
        return clusters, num_experts // clusters
    side = math.isqrt(num_experts)
    while num_experts % side:
        side -= 1
    return side, num_experts // side


def expert_map(grid: np.ndarray) -> ExpertMap:
    """A quantised grid of counts; large ones keep evenly spaced rows and columns."""
    rows, columns = steps_of(grid.shape)
    packed = zlib.compress(quantised(grid)[::rows, ::columns].tobytes(), 9)
    return ExpertMap(
        shape=list(grid.shape),
        levels=base64.b64encode(packed).decode("ascii"),
        structure=structure(grid) if min(grid.shape) > 1 else None,
    )


def steps_of(shape: Sequence[int]) -> list[int]:
    """Every how many rows and columns one is kept."""
    return [math.ceil(side / LARGEST_SIDE) for side in shape]


def quantised(grid: np.ndarray) -> np.ndarray:
    """Counts over their mean, on a log scale from 1 to 255; 0 where there is no token."""
    mean = grid.mean()
    if not mean:
        return np.zeros(grid.shape, np.uint8)
    with np.errstate(divide="ignore"):
        decades = np.log10(grid / mean).clip(-DECADES, DECADES)
    levels = 1 + np.rint((decades + DECADES) * LEVELS / (2 * DECADES))
    return np.where(grid > 0, levels, 0).astype(np.uint8)


def relative_usage(found: ExpertMap) -> np.ndarray:
    """The kept grid as count / mean, NaN where there was no token."""
    kept = [-(-side // step) for side, step in zip(found.shape, steps_of(found.shape), strict=True)]
    levels = np.frombuffer(zlib.decompress(base64.b64decode(found.levels)), np.uint8).reshape(kept)
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


def structure_by_chance(found: ExpertMap) -> float:
    """The expectation of `structure` where experts are shuffled."""
    rows, columns = found.shape
    return (rows + columns - 2) / (rows * columns - 1)


def maps(group: Group) -> dict[str, ExpertMap]:
    """Variant -> the map of its first seed that has one; coarse experts are too few."""
    return {
        variant: found[0]
        for variant, runs in group.variants.items()
        if runs[0].method != "coarse" and (found := [run.usage for run in runs if run.usage])
    }
