"""Whether this CPU computes the bfloat16 products it says it can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache

import torch

from airmoe.errors import ConfigError

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
FAULT = "this CPU names AMX among its instructions and then refuses it"
REMEDY = f"Set the environment variable {VARIABLE}={WITHOUT_AMX}"
PRODUCT = "import torch; rows = torch.ones(32, 32, dtype=torch.bfloat16); rows @ rows"


@cache
def product_kills() -> bool:
    """True where a bfloat16 product ends the process without a word, as on some virtual machines.

    Tried in a process of its own, which takes a second or two, and only where AMX is named.
    """
    if os.environ.get(VARIABLE) == WITHOUT_AMX or not torch.cpu._is_amx_tile_supported():
        return False
    tried = subprocess.run([sys.executable, "-P", "-c", PRODUCT], capture_output=True)
    return tried.returncode == -signal.SIGILL


def check_bfloat16(field: str, device_type: str) -> None:
    """Raise where computing in bf16 would kill this process."""
    if device_type == "cpu" and product_kills():
        raise ConfigError(
            field, "bf16", f"kills the process here, because {FAULT}", f"{REMEDY}, or use fp32."
        )
