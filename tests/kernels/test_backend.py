"""Which implementation computes, who decides it, and what is said when it is not the fast one."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from airmoe import ROUTERS
from airmoe.errors import ConfigError
from airmoe.kernels import backend
from airmoe.kernels.backend import backend_for, use_backend, use_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRMOE_BACKEND", raising=False)
    backend._decide.cache_clear()
    backend._say_once.cache_clear()


def test_each_device_has_its_own() -> None:
    assert backend_for(CPU, torch.float32) == "reference"
    assert backend_for(CUDA, torch.float32) == "triton"
    assert backend_for(CUDA, torch.bfloat16, torch.float32) == "triton"


def test_environment_and_block_override_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRMOE_BACKEND", "reference")
    assert backend_for(CUDA, torch.float32) == "reference"
    with use_backend("auto"):
        assert backend_for(CUDA, torch.float32) == "triton"
        with use_backend("reference"):
            assert backend_for(CUDA, torch.float32) == "reference"
        assert backend_for(CUDA, torch.float32) == "triton"
    assert backend_for(CUDA, torch.float32) == "reference"


def test_a_block_holds_in_other_threads_too() -> None:
    """Autograd has threads of its own."""
    with use_backend("reference"), ThreadPoolExecutor(1) as threads:
        assert threads.submit(backend_for, CUDA, torch.float32).result() == "reference"
    assert backend_for(CUDA, torch.float32) == "triton"


def test_a_model_is_built_where_its_backend_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("AIRMOE_BACKEND", "triton")
    for config in (router.Config for router in ROUTERS.values()):
        config.for_budget(dim=8, num_experts=16, top_k=2).build()


def test_an_empty_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRMOE_BACKEND", "")
    assert backend_for(CUDA, torch.float32) == "triton"


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="use_backend: got 'cuda', must be one of 'auto'"):
        use_backend("cuda").__enter__()  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("AIRMOE_BACKEND", "fast")
    with pytest.raises(ConfigError, match="AIRMOE_BACKEND: got 'fast'"):
        backend_for(CPU, torch.float32)


def test_triton_asked_for_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    said = "use_backend: got 'triton', cannot run here: Triton has no cpu device"
    with use_backend("triton"), pytest.raises(ConfigError, match=said):
        backend_for(CPU, torch.float32)
    monkeypatch.setenv("AIRMOE_BACKEND", "triton")
    with pytest.raises(ConfigError, match="AIRMOE_BACKEND: got 'triton'"):
        backend_for(CPU, torch.float32)


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_float64_on_a_gpu_uses_the_reference_and_says_so_once(
    choice: backend.Choice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "airmoe"), use_backend(choice):
        for _ in range(3):
            assert backend_for(CUDA, torch.float64) == "reference"
    assert [record.message for record in caplog.records] == [
        "Plain PyTorch computes instead of Triton, which is slower: Triton kernels take float32, "
        "float16 and bfloat16, not torch.float64."
    ]


def test_a_gpu_without_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda _name: None)
    with caplog.at_level(logging.WARNING, "airmoe"):
        assert backend_for(CUDA, torch.float32) == "reference"
    backend._decide.cache_clear()
    assert "pip install 'airmoe[kernels]'" in caplog.text


def test_operands_on_two_devices() -> None:
    with pytest.raises(ConfigError, match=r"device: got \['cpu', 'meta'\], must be one device"):
        use_triton(torch.zeros(2), None, torch.zeros(2, device="meta"))
