"""`airmoe doctor`: what this installation is and can do."""

from __future__ import annotations

import importlib.util
import sys

import torch
from rich.console import Console
from rich.table import Table

from airmoe.errors import say
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


def examine(console: Console) -> None:
    """Show versions, devices and kernels, then what is missing or would fail; changes nothing."""
    table = Table(show_header=False)
    for name, version in versions().items():
        table.add_row(name, version)
    table.add_section()
    devices = [(f"CPU, {torch.get_num_threads()} threads", torch.device("cpu"))]
    for place in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(place)
        name = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        devices.append((name, torch.device("cuda", place)))
    for name, device in devices:
        kernels = backend_for(device, torch.float32)
        table.add_row(name, f"kernels: {kernels.replace('reference', 'reference (PyTorch)')}")
    console.print(table)
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    for name in missing:
        purpose, extra = OPTIONAL[name]
        command = f"{sys.executable} -m pip install 'airmoe[{extra}]'"
        say(console, f"missing: {name}, for {purpose}. Add it: {command}")
    if not missing:
        say(console, "Nothing is missing.")
    if product_kills():
        say(console, f"bf16 on the CPU kills the process, because {FAULT}. {REMEDY}.")
