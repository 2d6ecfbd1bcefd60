"""Runs that many tests read and none may change; `unfinished` is a copy to be changed."""

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
def _unfinished(text: Path) -> Path:
    config = small_run(text, steps=6, eval_every=2)
    return killed(config, text / "unfinished", kills.before_step(4))


@pytest.fixture
def unfinished(_unfinished: Path, tmp_path: Path) -> Path:
    """A run of 6 steps, killed with a checkpoint at 2 only."""
    return Path(shutil.copytree(_unfinished, tmp_path / "run"))
