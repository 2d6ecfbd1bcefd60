"""Suites: runs that are fair to compare, run one after another and gone on with after a kill."""

from __future__ import annotations

from airmoe.experiments.suites.plan import Budget, Plan, PlannedRun, make_plan
from airmoe.experiments.suites.runner import run_suite
from airmoe.experiments.suites.variants import SUITES

__all__ = ["SUITES", "Budget", "Plan", "PlannedRun", "make_plan", "run_suite"]
