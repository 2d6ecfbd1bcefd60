"""What every test may count on: fixed seeds, NaN in unwritten memory, GPU tests only on a GPU."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests import interpreter

# cuBLAS is deterministic only with this, and it must be set before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Without a GPU Triton's interpreter runs the kernels; it must be told before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreter.spare_repeated_work()
# Some virtual machines name AMX among their instructions and then refuse it, which kills a process
# at its first bfloat16 product; oneDNN asks for this at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# A shell lets what it starts in the background ignore Ctrl-C, and processes of the tests would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class TorchRandom:
    """Lets Hypothesis seed torch before every example, so that a failing one can be repeated."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps only a weak reference
hypothesis.register_random(TORCH_RANDOM)
# The same examples every time: a red run must mean that the code changed.
hypothesis.settings.register_profile("airmoe", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("airmoe")


# Tests are small and run side by side (one worker per core): more threads would only wait for each
# other, and one thread makes sums repeatable to the bit.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _repeatable(request: pytest.FixtureRequest) -> None:
    """A seed of its own for every test, whatever ran before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """Fill `torch.empty` and its kin with NaN (integers: their maximum), on every device.

    torch does so in deterministic mode only. On a CPU that mode changes no value and costs one
    more write per tensor; on a GPU it also picks the deterministic kernels. `warn_only`, because
    an operation that has none is no failure.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
