"""Runs that many tests read and none may change; `unfinished` is a copy to be changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from airmoe.training import RunConfig
from tests.training import kills
from tests.training.runs import killed, small_model, small_run, trained


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and its tokens."""
    folder = tmp_path_factory.mktemp("text")
    small_run(folder)
    return folder


@pytest.fixture(scope="session")
def plain(text: Path) -> tuple[RunConfig, Path]:
    """The settings of most tests, 12 steps, and a run of them."""
    config = small_run(text)
    return config, trained(config, text / "plain")


@pytest.fixture(scope="session")
def lasting(text: Path) -> tuple[RunConfig, Path]:
    """The same, but lists live three steps."""
    model = small_model()
    model["router_options"] = {**model["router_options"], "refresh_every": 3}
    config = small_run(text, model)
    return config, trained(config, text / "lasting")


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
