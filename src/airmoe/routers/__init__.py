"""hidden -> Routing. A new router is its own file and one line in `ROUTERS`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from airmoe.errors import ConfigError
from airmoe.routers.air import AirRouter
from airmoe.routers.base import Router
from airmoe.routers.codebook import Codebook
from airmoe.routers.expert_choice import ExpertChoiceRouter
from airmoe.routers.hierarchical import HierarchicalRouter
from airmoe.routers.peer import PeerRouter
from airmoe.routers.routing import CellRouting, ExpertRouting, Routing, TokenRouting
from airmoe.routers.settings import RouterConfig
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

# What to do about a name that is not known.
ADD_YOURS = (
    "Choose one of these, or first import the module that adds yours to airmoe.ROUTERS (on the "
    "command line: airmoe --import MODULE ...)."
)


def import_modules(names: Sequence[str]) -> None:
    """Import what the user named, so that it can add to `ROUTERS`; never a name out of a file.

    Modules of the working folder are found however the process was started.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ModuleNotFoundError(name=name)
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
            raise ConfigError(
                "import",
                name,
                "must be a module that Python finds",
                "Give it without folder and .py; start where it lies or add that to PYTHONPATH.",
            ) from error
