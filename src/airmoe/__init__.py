"""Granular mixtures-of-experts with adaptive inverted-index routing (AIR).

Names are imported when they are first used: `import airmoe` and `airmoe --help` load no torch, and
only those who use the language model load transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airmoe import losses, metrics
    from airmoe.adapt import FfnExperts, calibrate, restore_routers, swap_ffn, swap_routers
    from airmoe.errors import ConfigError, RunError
    from airmoe.losses import load_balance_loss, router_z_loss, shortlist_balance_loss
    from airmoe.model import AirMoeConfig, AirMoeForCausalLM, TrackOptimizerCallback
    from airmoe.moe import CoarseExperts, GranularExperts, MoELayer, MoEOutput
    from airmoe.routers import (
        ROUTERS,
        AirRouter,
        CellRouting,
        Codebook,
        ExpertChoiceRouter,
        ExpertRouting,
        HierarchicalRouter,
        PeerRouter,
        Router,
        RouterConfig,
        Routing,
        TokenRouting,
        TopKRouter,
        track_optimizer,
    )

__version__ = "0.2.0"

__all__ = [
    "ROUTERS",
    "AirMoeConfig",
    "AirMoeForCausalLM",
    "AirRouter",
    "CellRouting",
    "CoarseExperts",
    "Codebook",
    "ConfigError",
    "ExpertChoiceRouter",
    "ExpertRouting",
    "FfnExperts",
    "GranularExperts",
    "HierarchicalRouter",
    "MoELayer",
    "MoEOutput",
    "PeerRouter",
    "Router",
    "RouterConfig",
    "Routing",
    "RunError",
    "TokenRouting",
    "TopKRouter",
    "TrackOptimizerCallback",
    "calibrate",
    "load_balance_loss",
    "losses",
    "metrics",
    "restore_routers",
    "router_z_loss",
    "shortlist_balance_loss",
    "swap_ffn",
    "swap_routers",
    "track_optimizer",
]

# Where the names live; what is not listed is a router's.
_HOMES = {
    "airmoe": ("losses", "metrics"),
    "airmoe.errors": ("ConfigError", "RunError"),
    "airmoe.losses": ("load_balance_loss", "router_z_loss", "shortlist_balance_loss"),
    "airmoe.model": ("AirMoeConfig", "AirMoeForCausalLM", "TrackOptimizerCallback"),
    "airmoe.moe": ("CoarseExperts", "GranularExperts", "MoELayer", "MoEOutput"),
    "airmoe.adapt": ("FfnExperts", "calibrate", "restore_routers", "swap_ffn", "swap_routers"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'airmoe' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "airmoe.routers")
    if home == "airmoe":
        return importlib.import_module(f"airmoe.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
