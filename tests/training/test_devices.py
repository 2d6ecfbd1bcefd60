"""What `auto` becomes on which machine, and that it never stops a run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe.errors import ConfigError
from airmoe.training import capture as capturing
from airmoe.training import devices, method_run, preset
from airmoe.training.config import TrainingOptions, workload_of
from airmoe.training.devices import Machine, check_device, settle, settle_speed
from airmoe.training.run_folder import open_run
from tests.training.runs import (
    Whole,
    differing,
    small_run,
    tensors_of,
    timeless_log,
    train_here,
)

H200 = Machine(cuda=True, bf16=True, triton=True, memory=139 * 2**30, processes=1)
LAPTOP_GPU = replace(H200, memory=8 * 2**30)
OLD_GPU = replace(H200, bf16=False, triton=False)
CPU = Machine(processes=1)


@pytest.fixture(autouse=True)
def _no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of the compiler needs a GPU."""
    monkeypatch.setattr(devices, "compiler_fault", lambda: None)


@pytest.mark.parametrize(
    ("name", "machine", "precision", "micro_batch_size"),
    [
        ("small", H200, "bf16", 64),  # the whole batch, as on the paper's four devices together
        ("small", replace(H200, processes=4), "bf16", 16),
        ("small", LAPTOP_GPU, "bf16", 16),
        ("large", H200, "bf16", 64),
        ("small", OLD_GPU, "fp32", 64),
        ("small", CPU, "fp32", 16),
        ("tiny", CPU, "fp32", 4),
    ],
)
def test_precision_and_micro_batch_are_settled(
    name: str, machine: Machine, precision: str, micro_batch_size: int
) -> None:
    run, lines = settle(preset(name), machine)
    found = run.training
    assert (found.precision, found.micro_batch_size) == (precision, micro_batch_size)
    assert run.training.batch_size == preset(name).training.batch_size
    assert lines[0].startswith(f"training.precision=auto: {precision}, because")
    assert settle(run, machine) == (run, [])  # nothing is left to settle


def test_all_methods_get_the_same_micro_batch() -> None:
    for machine in (H200, LAPTOP_GPU, CPU):
        sizes = {
            settle(method_run("small", method), machine)[0].training.micro_batch_size
            for method in ("air", "peer", "hierarchical", "exact", "coarse")
        }
        assert len(sizes) == 1


def test_a_token_takes_no_more_than_was_counted() -> None:
    """Peaks that `airmoe bench --step` measured on an H200, eager: 4.9 GiB for 16,384 tokens."""
    model = preset("small").model_config(128_256, eos_id=1)
    counted = 16_384 * devices.token_bytes(model) + devices.FIXED_BYTES
    assert 4.9 * 2**30 < counted < 2 * 4.9 * 2**30


@pytest.mark.parametrize(
    ("machine", "options", "compiled", "graph", "because"),
    [
        (H200, {}, True, True, None),
        (replace(H200, processes=2), {}, True, False, "there are 2 processes"),
        (H200, {"gradient_checkpointing": True}, True, False, "runs forwards again"),
        (H200, {"precision": "fp16"}, True, False, "steps may be skipped"),
        (replace(H200, triton=False), {}, False, True, "Triton cannot be used"),
        (CPU, {}, False, False, "there is no CUDA device"),
        (H200, {"compile": False, "cuda_graph": False}, False, False, None),
        (CPU, {"compile": True}, True, False, "there is no CUDA device"),
    ],
)
def test_compiler_and_graphs_are_on_where_they_can_be(
    machine: Machine, options: dict[str, Any], compiled: bool, graph: bool, because: str | None
) -> None:
    found, lines = settle_speed(TrainingOptions(batch_size=8, steps=1, **options), machine)
    assert (found.compile, found.cuda_graph) == (compiled, graph)
    automatic_ones = [name for name in ("compile", "cuda_graph") if name not in options]
    assert len(lines) == len(automatic_ones)
    assert because is None or any(because in line for line in lines)


def test_a_compiler_that_fails_its_trial_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "compiler_fault", lambda: "a trial failed (no gcc)")
    found, lines = settle_speed(TrainingOptions(batch_size=8, steps=1), H200)
    assert not found.compile
    assert "training.compile=auto: off, because a trial failed (no gcc)" in lines


def test_graphs_that_were_asked_for_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        check_device(small_run(tmp_path, cuda_graph=True), num_processes=1)


def test_a_run_keeps_what_was_settled(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=2, micro_batch_size="auto", precision="auto", compile="auto")
    train_here(config, tmp_path / "run")
    kept = open_run(tmp_path / "run").config.training
    assert (kept.micro_batch_size, kept.precision, kept.compile) == (8, "fp32", "auto")


@pytest.mark.parametrize("fault", ["capture", "hook"])
def test_steps_run_plainly_where_graphs_are_refused(
    plain: Whole,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """With the same bits as a run that never tried."""

    def refuse(micro_batches: capturing.CapturedMicroBatches) -> Any:
        for router in micro_batches._routers:  # as far as a real capture may come
            router.lists_renewed("lists")
        raise RuntimeError("operation not permitted when stream is capturing\nand a trace")

    def forced(options: TrainingOptions, machine: Machine) -> tuple[TrainingOptions, list[str]]:
        return replace(options, cuda_graph=True), []

    monkeypatch.setattr("airmoe.training.run.settle_speed", forced)
    if fault == "capture":
        monkeypatch.setattr(capturing.CapturedMicroBatches, "_capture", refuse)
    else:
        monkeypatch.setattr(capturing, "has_hooks", lambda _: True)
    with caplog.at_level(logging.WARNING, logger="airmoe"):
        train_here(plain.config, tmp_path / "tried")
    said = [record.message for record in caplog.records if "CUDA graphs are off" in record.message]
    assert len(said) == 1 and "trace" not in said[0]
    assert timeless_log(tmp_path / "tried") == timeless_log(plain.path)
    one, other = (tensors_of(run / "checkpoint-12") for run in (plain.path, tmp_path / "tried"))
    assert differing(one, other) == []


def test_hooks_are_seen() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert not capturing.has_hooks(model)
    of_all_modules = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert capturing.has_hooks(model)
    of_all_modules.remove()
    assert not capturing.has_hooks(model)
    model[0].register_full_backward_hook(lambda *_: None)
    assert capturing.has_hooks(model)


def test_the_ledger_counts_a_step_in_one_micro_batch_per_device() -> None:
    run = preset("small")
    assert workload_of(run, devices=4).tokens_per_micro_batch == 16 * 256
