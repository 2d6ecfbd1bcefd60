"""What the tests of reports start from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.experiments.report_toys import write_run, write_suite

# It needs the extra `plot`.
collect_ignore = [] if importlib.util.find_spec("matplotlib") else ["test_report_figures.py"]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "good")
    return tmp_path / "runs"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Four methods of one seed, equally good."""
    methods = ("air", "peer", "hierarchical", "coarse")
    return write_suite(tmp_path / "suites" / "main", "main", dict.fromkeys(methods, 60.0))
