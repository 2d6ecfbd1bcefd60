"""`airmoe doctor` says what is there, what runs, and what is missing with the command for it."""

from __future__ import annotations

import importlib.util
import platform
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from airmoe import ConfigError
from airmoe.commands import OPTIONAL, doctor
from airmoe.training import devices, override, preset
from airmoe.training.devices import autocast_of, check_device
from tests.training.command import table_rows

Printed = pytest.CaptureFixture[str]


def shown(printed: Printed) -> str:
    doctor()
    return printed.readouterr().out


def test_versions_devices_and_kernels(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRMOE_BACKEND", "reference")
    found = dict(table_rows(shown(capsys)))
    assert found["python"] == platform.python_version()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["transformers"] == transformers.__version__
    assert found[f"CPU, {torch.get_num_threads()} threads"] == "kernels: reference (PyTorch)"


def test_missing_packages_come_with_the_command_that_adds_them(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name in ("datasets", "tensorboard") else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    text = shown(capsys)
    for package, extra in (("datasets", "data"), ("tensorboard", "track")):
        (line,) = [line for line in text.splitlines() if line.startswith(f"missing: {package},")]
        assert OPTIONAL[package][0] in line
        assert line.rstrip().endswith(f"{sys.executable} -m pip install 'airmoe[{extra}]'")
    assert "Nothing is missing" not in text


def test_nothing_missing(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    text = shown(capsys)
    assert "Nothing is missing." in text and "missing:" not in text


@pytest.mark.parametrize("killed", [True, False])
def test_a_cpu_that_refuses_its_own_instructions(
    killed: bool, capsys: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some virtual machines do; the product is tried, in a process of its own.

    That process takes no file of the working folder for a module.
    """
    (tmp_path / "signal.py").write_text("open('planted', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(devices.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    end = "os.kill(os.getpid(), signal.SIGILL)" if killed else "pass"
    monkeypatch.setattr(devices, "PRODUCT", f"import os, signal; {end}")
    devices.product_kills.cache_clear()
    try:
        assert (
            "Set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16." in shown(capsys)
        ) == (killed)
        with pytest.raises(ConfigError, match="names AMX") if killed else nullcontext():
            check_device(override(preset("tiny"), ["training.precision=bf16"]), 1)
        with pytest.raises(ConfigError, match="or use fp32") if killed else nullcontext():
            autocast_of("bf16", torch.device("cpu"))
        devices.check_bfloat16("precision", "cuda")
    finally:
        devices.product_kills.cache_clear()
    assert not (tmp_path / "planted").exists()


def test_the_product_that_is_tried() -> None:
    exec(devices.PRODUCT, {})


def test_the_extras_named_exist() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, (_, extra) in OPTIONAL.items():
        names = [entry.split(">")[0].replace("-", "_") for entry in extras[extra]]
        assert package in names
