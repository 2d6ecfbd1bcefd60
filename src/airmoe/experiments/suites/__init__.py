"""Suites: runs that are fair to compare, one after another; a killed suite goes on where it was.

variants.py and fairness.py -> plan.py -> runner.py, which executes runs in folder.py's layout and
shows them (progress.py)
"""

from __future__ import annotations

from airmoe.experiments.suites.plan import Budget, Plan, PlannedRun, make_plan
from airmoe.experiments.suites.runner import run_suite
from airmoe.experiments.suites.variants import SUITES

__all__ = ["SUITES", "Budget", "Plan", "PlannedRun", "make_plan", "run_suite"]
