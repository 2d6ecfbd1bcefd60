"""AIR inside existing Hugging Face models: swap their routers, fit the codebooks, undo it.

Importing this loads no transformers; `airmoe.moe.swap.models` does, and makes swapped checkpoints
known to the Auto classes.
"""

from __future__ import annotations

from airmoe.moe.swap.calibration import calibrate
from airmoe.moe.swap.replace import restore_routers, swap_routers
from airmoe.moe.swap.report import CalibrationReport, LayerReport, Trial

__all__ = [
    "CalibrationReport",
    "LayerReport",
    "Trial",
    "calibrate",
    "restore_routers",
    "swap_routers",
]
