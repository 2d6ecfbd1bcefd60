"""Maps of expert usage are most of a report.json: it keeps those that are drawn."""

from __future__ import annotations

from dataclasses import replace

from airmoe.experiments.report.groups import Key, key_of, settings_of
from airmoe.experiments.report.record import Record


def one_map_each(record: Record) -> Record:
    """One seed of a row is drawn: keep the first."""
    drawn: set[tuple[Key, str, str]] = set()
    kept = []
    for run in record.runs:
        if run.usage is not None and run.usage.experts.levels is not None:
            row = (key_of(run), run.variant, settings_of(run))
            if row in drawn:
                experts = replace(run.usage.experts, levels=None)
                run = replace(run, usage=replace(run.usage, experts=experts))
            drawn.add(row)
        kept.append(run)
    return replace(record, runs=kept)
