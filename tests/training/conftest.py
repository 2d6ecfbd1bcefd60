"""Runs that many tests read and none may change; `unfinished` is a copy for a test to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training import kills
from tests.training.runs import OPTIONS, Whole, killed, small_model, small_run, trained


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and its tokens."""
    folder = tmp_path_factory.mktemp("text")
    small_run(folder)
    return folder


@pytest.fixture(scope="session")
def plain(text: Path) -> Whole:
    """The settings of most tests, 12 steps, and a run of them."""
    config = small_run(text)
    return Whole(config, trained(config, text / "plain"))


@pytest.fixture(scope="session")
def lasting(text: Path) -> Whole:
    """The same, but lists live three steps."""
    config = small_run(text, small_model(router_options=OPTIONS | {"refresh_every": 3}))
    return Whole(config, trained(config, text / "lasting"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where a test may make a run."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def finished(text: Path) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4."""
    return trained(small_run(text, steps=4, eval_every=2), text / "finished")


@pytest.fixture(scope="session")
def _unfinished(lasting: Whole) -> Path:
    return killed(lasting.config, lasting.path.with_name("unfinished"), kills.before_step(10))


@pytest.fixture
def unfinished(_unfinished: Path, tmp_path: Path) -> Path:
    """The lasting run, killed with checkpoints of steps 4 and 8; the lists of 8 are in it."""
    return Path(shutil.copytree(_unfinished, tmp_path / "run"))
