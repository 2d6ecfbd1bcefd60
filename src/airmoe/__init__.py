"""Granular mixtures-of-experts with adaptive inverted-index routing (AIR)."""

from __future__ import annotations

from airmoe import losses, metrics
from airmoe.errors import ConfigError
from airmoe.losses import load_balance_loss, router_z_loss, shortlist_balance_loss
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

__version__ = "0.1.0"

__all__ = [
    "ROUTERS",
    "AirRouter",
    "CellRouting",
    "CoarseExperts",
    "Codebook",
    "ConfigError",
    "ExpertChoiceRouter",
    "ExpertRouting",
    "GranularExperts",
    "HierarchicalRouter",
    "MoELayer",
    "MoEOutput",
    "PeerRouter",
    "Router",
    "RouterConfig",
    "Routing",
    "TokenRouting",
    "TopKRouter",
    "load_balance_loss",
    "losses",
    "metrics",
    "router_z_loss",
    "shortlist_balance_loss",
    "track_optimizer",
]
