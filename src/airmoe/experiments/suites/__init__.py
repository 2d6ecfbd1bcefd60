"""Suites: runs that are fair to compare, one after another; a killed suite resumes.

variants.py and fairness.py -> plan.py -> run.py: a process (child.py) for each run, in folder.py's
layout, shown by progress.py
"""

from __future__ import annotations

from airmoe.experiments.suites.plan import Plan, PlannedRun, make_plan
from airmoe.experiments.suites.run import run_suite
from airmoe.experiments.suites.variants import SUITES

__all__ = ["SUITES", "Plan", "PlannedRun", "make_plan", "run_suite"]
