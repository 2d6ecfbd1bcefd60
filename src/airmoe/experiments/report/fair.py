"""Takes out of a group the variant that breaks the rules of its suite, or says they are broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from airmoe.experiments.fairness import ALL_RULES, Rule, Violation, violations
from airmoe.experiments.report.corpora import PREPARING, own_recipe
from airmoe.experiments.report.groups import Group, Grouped
from airmoe.experiments.suites import SUITES

SEEDS = "training.seed"


@dataclass(frozen=True)
class Finding:
    """A broken rule, and the one variant without which it would hold, if there is just one."""

    violation: Violation
    offender: str | None


def fair_groups(grouped: Grouped) -> Grouped:
    """The same groups without the variants that alone break a rule; every finding has its line."""
    groups, left_out, notes = [], list(grouped.left_out), list(grouped.notes)
    for group in grouped.groups:
        kept = group
        while findings := _findings(kept):
            dropped = next((one for one in findings if one.offender is not None), None)
            if dropped is None or group.key.suite is None:  # single runs promise no equality
                notes += [f"{group.title}: {one.violation}" for one in findings]
                break
            left_out.append(f"{group.title}: {dropped.offender} is left out. {dropped.violation}")
            runs = [run for run in kept.runs if run.variant != dropped.offender]
            kept = replace(kept, runs=runs)
        groups.append(kept)
    return Grouped(groups, left_out, notes)


def _findings(group: Group) -> list[Finding]:
    suite = SUITES.get(group.key.suite or "")
    found = _violations(group, ALL_RULES if suite is None else suite.rules)
    return [Finding(one, _offender(one, group)) for one in found]


def _offender(violation: Violation, group: Group) -> str | None:
    """The variant whose absence mends it; None where several would."""
    if len(group.variants) < 3:
        return None
    mending = []
    for variant in group.variants:
        rest = replace(group, runs=[run for run in group.runs if run.variant != variant])
        left = _violations(rest, [violation.rule])
        if not any(one.what == violation.what for one in left):
            mending.append(variant)
    return mending[0] if len(mending) == 1 else None


def _violations(group: Group, rules: Sequence[Rule]) -> list[Violation]:
    """Of one run per variant: its seeds share their settings, and groups.py compares the seeds.

    A group has one text, so what a run would have prepared does not matter where it was not asked.
    """
    firsts = {variant: seeds[0] for variant, seeds in group.variants.items()}
    without_a_say = PREPARING if all(map(own_recipe, firsts.values())) else ()
    runs = {variant: run.settings for variant, run in firsts.items()}
    found = violations(runs, rules)
    return [one for one in found if one.what not in (SEEDS, *without_a_say)]
