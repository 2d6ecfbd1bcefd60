"""Precisions and compiled layers: the same run, to what their arithmetic allows."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import OPTIONS, small_model, small_run, timeless_log, train_here, trained


def run_of(folder: Path, name: str, **options: Any) -> Path:
    given: dict[str, Any] = {"steps": 4, "eval_every": 4, "log_every": 1, **options}
    return trained(small_run(folder, **given), folder / name)


def one_layer() -> dict[str, Any]:
    return small_model(num_hidden_layers=1, moe_layers=[0])


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in timeless_log(run)]


def test_bf16_computes_in_bf16_and_keeps_its_state_in_float32(tmp_path: Path) -> None:
    single = run_of(tmp_path, "fp32")
    half = run_of(tmp_path, "bf16", precision="bf16")
    assert all(math.isfinite(loss) for loss in losses(half))
    assert losses(half) != losses(single)  # it really computes otherwise
    # A product rounded to 8 bits is off by 2^-9; a loss of 5.5 nats is the mean of 248 of them.
    assert losses(half)[0] == pytest.approx(losses(single)[0], rel=2**-9)
    saved = load_file(half / "checkpoint-4" / "model.safetensors")
    assert {tensor.dtype for name, tensor in saved.items() if "codebook" in name} >= {torch.float32}
    for name, tensor in saved.items():
        assert not tensor.is_floating_point() or tensor.dtype == torch.float32, name
        assert tensor.isfinite().all(), name
    moments = load_file(half / "checkpoint-4" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_train_the_same(tmp_path: Path) -> None:
    # Steps 1 and 4 are watched, hence not compiled; the loss of the last line is that of 2 to 4.
    options = {"steps": 4, "log_every": 4, "eval_blocks": 4, "model": one_layer()}
    eager = run_of(tmp_path, "eager", **options)
    compiled = run_of(tmp_path, "compiled", **options, compile=True)
    one, other = (
        load_file(run / "checkpoint-4" / "model.safetensors") for run in (eager, compiled)
    )
    assert one.keys() == other.keys()  # no "_orig_mod" in front
    assert any(not torch.equal(one[name], other[name]) for name in one)  # it computes otherwise
    # Fused sums add in another order: a few roundings of 2^-24 in losses near 5.5, after one
    # optimizer step that makes them at most some thousand times larger (learning rate / epsilon).
    assert losses(compiled)[0] == pytest.approx(losses(eager)[0], rel=1e-6)
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batch_size", [8, 4])  # one or two of them in a step
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_graphs_train_the_same(tmp_path: Path, micro_batch_size: int, refresh_every: int) -> None:
    """Steps that are logged run as always, the others from graphs, in one run side by side."""
    model = small_model(router_options=OPTIONS | {"refresh_every": refresh_every})
    options: dict[str, Any] = {"steps": 16, "eval_every": 8, "log_every": 5, "precision": "bf16"}
    options |= {"micro_batch_size": micro_batch_size, "model": model}
    plain, captured = tmp_path / "plain", tmp_path / "captured"
    for folder, graph in ((plain, False), (captured, True)):  # CUDA does not survive a fork
        train_here(small_run(tmp_path, **options, cuda_graph=graph), folder)
    assert losses(captured) == pytest.approx(losses(plain), rel=2e-3)
    for wanted, found in zip(timeless_log(plain), timeless_log(captured), strict=True):
        assert wanted.keys() == found.keys()
        for name in ("step", "tokens", "flops", "learning_rate"):
            assert wanted.get(name) == found.get(name)
    one, other = (
        load_file(run / "checkpoint-16" / "model.safetensors") for run in (plain, captured)
    )
    for name, tensor in one.items():
        if "micro_batches" in name or "counts" in name:  # observed as often
            torch.testing.assert_close(other[name], tensor, rtol=0.05, atol=0.05, msg=name)
