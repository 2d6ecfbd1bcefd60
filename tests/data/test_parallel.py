"""Worker processes: results in order, little held at once, and every death noticed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from airmoe.data.parallel import Encoder, EncoderPool, in_validation
from tests.data.common import refused
from tests.data.moody import Moody
from tests.training.command import pythonpath

WORKERS = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(Encoder(Moody(), 0.0), WORKERS) as pool:
        yield pool


def test_results_come_in_order_and_end_with_the_end_of_text(pool: EncoderPool) -> None:
    slow = [["slow"]] * WORKERS  # each needs a worker of its own
    batches = [*slow, *(["x" * number, "yy"] for number in range(1, 40))]
    results = list(pool.encode(batches))
    found = [[int(document.tokens[0]) for document in batch] for batch in results]
    assert found == [*[[4]] * WORKERS, *([number, 2] for number in range(1, 40))]
    assert all(document.tokens[-1] == 0 for batch in results for document in batch)
    assert len(multiprocessing.active_children()) == WORKERS


def test_little_is_read_ahead_of_a_slow_batch(pool: EncoderPool) -> None:
    read = []

    def batches() -> Iterator[list[str]]:
        for number in range(1000):
            read.append(number)
            yield ["slow" if number == 0 else "quick"]

    with closing(pool.encode(batches())) as results:
        next(results)
        assert len(read) <= 4 * WORKERS


def test_a_run_that_is_given_up_leaves_nothing_for_the_next(pool: EncoderPool) -> None:
    for _ in range(3):
        with closing(pool.encode(["x"] for _ in range(100))) as results:
            next(results)
    assert [int(batch[0].tokens[0]) for batch in pool.encode([["ab"], ["abc"]])] == [2, 3]


def test_an_error_in_a_worker_is_told() -> None:
    pool = EncoderPool(Encoder(Moody(), 0.0), 2)
    with pool, pytest.raises(RuntimeError, match="cannot read this"):
        list(pool.encode([["fine"], ["wrong"], ["fine"]]))


def test_a_dead_worker_is_told_and_nobody_waits_for_it() -> None:
    start = time.monotonic()
    pool = EncoderPool(Encoder(Moody(), 0.0), 2)
    before = {*multiprocessing.active_children()}
    with pool, refused("prepare.workers", "exit code -9", "goes on where this stopped"):
        list(pool.encode([["fine"], ["deadly"], *[["fine"]] * 20]))
    assert time.monotonic() - start < 30
    assert before >= {*multiprocessing.active_children()}


def test_the_hash_decides_the_split() -> None:
    # sha256("abc") = ba7816bf 8f01cfea ..., that is 0.7283...
    assert not in_validation("abc", 0.7283) and in_validation("abc", 0.7285)
    assert not in_validation("abc", 0.0)
    share = sum(in_validation(f"text {number}", 0.1) for number in range(5000)) / 5000
    assert 0.085 < share < 0.115  # 3.5 standard deviations


PLANTED = "open('ran', 'w')\n"
POOL = """
from airmoe.data.parallel import Encoder, EncoderPool
from airmoe.data.tokenizers import BytesTokenizer

if __name__ == "__main__":
    with EncoderPool(Encoder(BytesTokenizer(), 0.0), 2) as pool:
        print(sum(len(batch) for batch in pool.encode([["text"]] * 40)))
"""


@pytest.mark.slow
def test_workers_import_nothing_from_the_working_folder(tmp_path: Path) -> None:
    for name in ("numpy", "json", "torch"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-P", "-c", POOL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": pythonpath()},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "40\n"), done
    assert not (tmp_path / "ran").exists()
