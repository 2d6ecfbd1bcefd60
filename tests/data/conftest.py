"""No waiting for the disk (only a power failure could tell), and workers for any text at all."""

from __future__ import annotations

import os

import pytest

from airmoe.data import parallel


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _workers_from_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "BATCHES_ALONE", 0)
