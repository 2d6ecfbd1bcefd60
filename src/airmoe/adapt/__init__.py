"""Other people's models: AIR routers, granular layers and fitted codebooks inside them.

Importing this loads no transformers; `airmoe.adapt.models` does, and makes saved models known to
the Auto classes.
"""

from __future__ import annotations

from airmoe.adapt.calibration import CalibrationReport, LayerReport, calibrate
from airmoe.adapt.ffn_swap import FfnExperts, swap_ffn
from airmoe.adapt.fitting import Trial
from airmoe.adapt.router_swap import restore_routers, swap_routers

__all__ = [
    "CalibrationReport",
    "FfnExperts",
    "LayerReport",
    "Trial",
    "calibrate",
    "restore_routers",
    "swap_ffn",
    "swap_routers",
]
