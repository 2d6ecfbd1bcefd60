"""hidden -> Routing. A new router is its own file and one line in `ROUTERS`."""

from __future__ import annotations

from airmoe.routers.air import AirRouter
from airmoe.routers.base import Router, RouterConfig
from airmoe.routers.codebook import Codebook
from airmoe.routers.expert_choice import ExpertChoiceRouter
from airmoe.routers.hierarchical import HierarchicalRouter
from airmoe.routers.peer import PeerRouter
from airmoe.routers.routing import CellRouting, ExpertRouting, Routing, TokenRouting
from airmoe.routers.topk import TopKRouter
from airmoe.routers.tracking import track_optimizer

ROUTERS: dict[str, type[Router]] = {
    "air": AirRouter,
    "peer": PeerRouter,
    "hierarchical": HierarchicalRouter,
    "topk": TopKRouter,
    "expert_choice": ExpertChoiceRouter,
}

__all__ = [
    "ROUTERS",
    "AirRouter",
    "CellRouting",
    "Codebook",
    "ExpertChoiceRouter",
    "ExpertRouting",
    "HierarchicalRouter",
    "PeerRouter",
    "Router",
    "RouterConfig",
    "Routing",
    "TokenRouting",
    "TopKRouter",
    "track_optimizer",
]
