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

# Where the names are looked up, in this order: only `model` loads transformers.
_PARTS = ("errors", "routers", "moe", "losses", "adapt", "model")


def __getattr__(name: str) -> Any:
    if name in ("losses", "metrics"):
        return importlib.import_module(f"airmoe.{name}")
    for part in _PARTS if name in __all__ else ():
        module = importlib.import_module(f"airmoe.{part}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module 'airmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
