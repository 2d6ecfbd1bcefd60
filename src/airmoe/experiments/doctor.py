"""`airmoe doctor`: what this installation is and can do."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import airmoe.kernels
from airmoe.training.run_folder import versions

# What needs which package, and the extra that brings it.
OPTIONAL = {
    "datasets": ("wikitext103, c5, openwebtext2 and .parquet", "data"),
    "tiktoken": ("the Llama-3 tokenizer", "data"),
    "llama_models": ("the Llama-3 tokenizer by name", "data"),
    "zstandard": (".zst files", "data"),
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


def examine() -> Examination:
    """Look at this installation; starts nothing and changes nothing."""
    return Examination(
        versions=versions(), devices=_devices(), kernels=_kernels(), missing=_missing()
    )


def _devices() -> list[str]:
    found = [f"CPU, {torch.get_num_threads()} threads"]
    for place in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(place)
        found.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return found


def _kernels() -> dict[str, str]:
    """Operation -> the file that computes it on this machine's best device."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    names = [m.name for m in pkgutil.iter_modules(airmoe.kernels.__path__) if m.ispkg]
    return {name: f"{_implementation(name, device_type)} (PyTorch)" for name in names}


def _implementation(name: str, device_type: str) -> str:
    """Operations with a choice have a function that makes it; the others have a reference only."""
    package = importlib.import_module(f"airmoe.kernels.{name}")
    choose = getattr(package, "implementation", None)
    return "reference" if choose is None else choose(device_type)


def _missing() -> dict[str, tuple[str, str]]:
    pip = f"{sys.executable} -m pip install"
    return {
        package: (purpose, f"{pip} 'airmoe[{extra}]'")
        for package, (purpose, extra) in OPTIONAL.items()
        if importlib.util.find_spec(package) is None
    }
