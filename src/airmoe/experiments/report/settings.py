"""The settings behind a group: those all runs share, those in which they differ, and where from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from airmoe.experiments.report.document import Block, Cell, Details, Table
from airmoe.experiments.report.groups import Group, flat, options_of
from airmoe.experiments.report.metrics import DASH
from airmoe.experiments.report.names import title_of
from airmoe.experiments.report.record import Run


def settings(group: Group) -> Details:
    """Everything needed to run it again, folded away."""
    described = {variant: _described(runs) for variant, runs in group.variants.items()}
    keys = list(dict.fromkeys(key for values in described.values() for key in values))
    shared, differing = [], []
    for key in keys:
        found = {values.get(key) for values in described.values()}
        (shared if len(found) == 1 else differing).append(key)
    first = next(iter(described.values()))
    blocks: list[Block] = [
        Table(
            caption="Settings all runs share.",
            columns=["setting", "value"],
            rows=[[Cell(text=key), Cell(text=first[key])] for key in shared],
            words=True,
        )
    ]
    if differing:
        rows = [
            [Cell(text=title_of(variant)), *(Cell(text=values.get(key, DASH)) for key in differing)]
            for variant, values in described.items()
        ]
        caption = "Settings in which the variants differ."
        columns = ["variant", *differing]
        blocks.insert(0, Table(caption=caption, columns=columns, rows=rows, words=True))
    return Details("Settings, versions and machine", blocks)


def _described(runs: Sequence[Run]) -> dict[str, str]:
    """Setting -> its value, or all the values that the seeds of a variant have."""
    found: dict[str, dict[str, None]] = {}  # an ordered set
    for run in runs:
        about = {
            "data hash": run.data_sha256,
            "balance loss": run.convention,
            "git": run.git,
            "machine": run.machine,
            "versions": run.versions,
        }
        for key, value in (options_of(run) | flat(about)).items():
            found.setdefault(key, {})[_text(value)] = None
    return {key: ", ".join(values) for key, values in found.items()}


def _text(value: Any) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value)
