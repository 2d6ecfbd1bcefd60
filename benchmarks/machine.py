"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("airmoe", "numpy", "PEER-pytorch", "einops", "einx")


def describe_machine() -> dict[str, Any]:
    """Versions, processor, memory, load and commit."""
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # with its build, which metadata may lack
            **{package: _version(package) for package in PACKAGES},
        },
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "platform": platform.platform(),
        "thread_settings": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))
        },
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
