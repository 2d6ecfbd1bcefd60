"""`airmoe doctor`: what this installation is and can do."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import airmoe.kernels
from airmoe.kernels.backend import backend_for
from airmoe.training.devices import FAULT, REMEDY, product_kills
from airmoe.training.run_folder import versions

# What needs which package, and the extra that brings it.
OPTIONAL = {
    "triton": ("the fast kernels of a CUDA device", "kernels"),
    "datasets": ("wikitext103, c5, openwebtext2 and .parquet", "data"),
    "llama_models": ("the Llama-3 tokenizer by name", "data"),
    "matplotlib": ("figures", "plot"),
    "tensorboard": ("TensorBoard logs", "track"),
}


@dataclass(frozen=True)
class Examination:
    """What was found."""

    versions: dict[str, str]
    devices: list[str]
    kernels: dict[str, str]  # operation -> implementation in use
    missing: dict[str, tuple[str, str]]  # package -> (what for, command)
    faults: list[str]  # what would fail, and the remedy

    def show(self, console: Console) -> None:
        for title, rows in (
            ("versions", self.versions),
            ("devices", {str(place): name for place, name in enumerate(self.devices)}),
            ("kernels in use", self.kernels),
        ):
            table = Table(title=title, show_header=False, title_justify="left")
            for name, value in rows.items():
                table.add_row(name, value)
            console.print(table)
        if not self.missing:
            console.print("Nothing is missing.")
        for package, (purpose, command) in self.missing.items():
            console.print(f"missing: {package}, for {purpose}. Add it: {command}", markup=False)
        for fault in self.faults:
            console.print(fault, markup=False, highlight=False, soft_wrap=True)


def examine() -> Examination:
    """Look at this installation; changes nothing."""
    return Examination(
        versions=versions(),
        devices=_devices(),
        kernels=_kernels(),
        missing=_missing(),
        faults=_faults(),
    )


def _devices() -> list[str]:
    found = [f"CPU, {torch.get_num_threads()} threads"]
    for place in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(place)
        found.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return found


def _kernels() -> dict[str, str]:
    """Operation -> what computes it on this machine's best device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = backend_for(device, torch.float32)
    names = {"reference": "reference (PyTorch)", "triton": "triton"}
    modules = {module.name for module in pkgutil.iter_modules(airmoe.kernels.__path__)}
    operations = sorted(name for name in modules if f"{name}_triton" in modules)
    return {operation: names[chosen] for operation in operations}


def _faults() -> list[str]:
    if not product_kills():
        return []
    return [f"bf16 on the CPU kills the process, because {FAULT}. {REMEDY}."]


def _missing() -> dict[str, tuple[str, str]]:
    pip = f"{sys.executable} -m pip install"
    return {
        package: (purpose, f"{pip} 'airmoe[{extra}]'")
        for package, (purpose, extra) in OPTIONAL.items()
        if importlib.util.find_spec(package) is None
    }
