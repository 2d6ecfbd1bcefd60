"""What the tests of reports start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.report_toys import write_main_suite, write_run


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "good")
    return tmp_path / "runs"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Four methods, all fine."""
    return write_main_suite(tmp_path / "suites" / "main")
