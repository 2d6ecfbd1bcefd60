"""Routers with a codebook as calibration sees them: swapped ones and AirRouters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from airmoe.adapt.codebook import ScaledCodebook
from airmoe.adapt.shortlist_router import ShortlistRouter
from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError
from airmoe.routers.air import AirRouter
from airmoe.routers.codebook import Codebook
from airmoe.routers.topk import TopKRouter


class CalibratedLayer:
    """A swapped router whose codebook can be fitted."""

    router: Any

    def __init__(self, name: str, router: Any) -> None:
        self.name, self.router = name, router
        self.dim, self.num_experts = router.hidden_dim, router.num_experts
        self.num_codewords = router.codebook.num_codewords
        self.shortlist_size = router.shortlist_size
        # The smallest shortlist that the router's rules allow.
        self.least_size = min(router.least_shortlist(router), router.num_experts)
        # Whether one of the exact top-K that is a candidate is always chosen.
        self.keeps_candidates = router.keeps_candidates

    @property
    def device(self) -> torch.device:
        return next(self.router.parameters()).device

    def new_codebook(self, num_codewords: int) -> Codebook:
        """One of the router's kind that learns by whole steps of k-means."""
        return ScaledCodebook(num_codewords, self.dim)

    def install(self, fitted: Codebook) -> None:
        """Take over what a codebook of the same size has learned."""
        codebook = self.router.codebook
        state = fitted.state_dict()
        state["seed"] = codebook.seed.clone()  # of the noise, which is not learned
        codebook.load_state_dict(state)

    def route_exactly(self, exactly: bool) -> None:
        """Score every expert until told otherwise: codebooks are fitted to what that shows."""
        self.router.scores_everything = exactly

    def largest_norm(self) -> float:
        """The largest length of an expert's centroid."""
        return _largest_norm(self.router.weight)

    def representatives(self, codebook: Any) -> Tensor:
        """The token each codeword stands for: [G, D]."""
        return codebook.representatives()

    def logits(self, hidden: Tensor) -> Tensor:
        """Exact: [T, D] -> [T, E]."""
        return self.router.full_logits(hidden)

    def ranking(self, representatives: Tensor) -> Tensor:
        """Experts for each codeword's representative, best first: [G, D] -> [G, E]."""
        return self.router.ranking(representatives)

    def masses(self, logits: Tensor) -> Tensor:
        """The routing distribution: [T, E] -> [T, E]."""
        return self.router.masses(logits)

    def chosen(self, logits: Tensor) -> Tensor:
        """The experts that logits (-inf: no candidate) select: [T, E] -> [T, K]."""
        return self.router.select(logits, logits.dtype)[1]


class AirLayer(CalibratedLayer):
    """An AirRouter, in a layer of the user's own or of `swap_ffn`."""

    def __init__(self, name: str, router: AirRouter) -> None:
        self.name, self.router = name, router
        self.config = config = router.config
        self.dim, self.num_experts = config.dim, config.num_experts
        self.num_codewords, self.shortlist_size = config.num_codewords, config.shortlist_size
        self.least_size, self.keeps_candidates = config.top_k, True
        self._hook: Any = None  # in place while the routing is exact

    def new_codebook(self, num_codewords: int) -> Codebook:
        return Codebook(num_codewords, self.dim, self.config.codebook, decay=0.0)

    def route_exactly(self, exactly: bool) -> None:
        """A router that was trained keeps its own routing: its model is used to that."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        untrained = not bool(self.router.codebook.initialized)
        if exactly and untrained and self.config.gate != "expert_choice":
            self._hook = self.router.register_forward_hook(_exact_routing, with_kwargs=True)

    def largest_norm(self) -> float:
        return 1.0 if self.config.normalize_centroids else _largest_norm(self.router.centroids)

    def representatives(self, codebook: Codebook) -> Tensor:
        return codebook.codewords

    def ranking(self, representatives: Tensor) -> Tensor:
        return self.logits(representatives).argsort(dim=-1, descending=True, stable=True)

    def masses(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def chosen(self, logits: Tensor) -> Tensor:
        return logits.topk(self.config.top_k, dim=-1).indices


def find_layers(model: nn.Module) -> list[CalibratedLayer]:
    """Every router of a model that has a codebook."""
    found: list[CalibratedLayer] = []
    for name, module in model.named_modules():
        if isinstance(module, ShortlistRouter):
            found.append(CalibratedLayer(name, module))
        elif isinstance(module, AirRouter):
            found.append(AirLayer(name, module))
    if not found:
        raise ConfigError(
            "calibrate.model",
            type(model).__name__,
            "must have routers with a codebook",
            "Call airmoe.swap_routers or airmoe.swap_ffn first.",
        )
    for layer in found:
        if any(tensor.is_meta for tensor in layer.router.state_dict().values()):
            raise ConfigError(
                "calibrate.model",
                f"{layer.name!r} on the meta device",
                "must have the weights of its routers in memory",
                "Load the model without offloading it to CPU or disk, then calibrate.",
            )
    return found


def _exact_routing(
    router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any
) -> Any:
    """A hook that replaces what an untrained AirRouter returns by the routing over all experts."""
    assert isinstance(router, AirRouter)
    config = router.config
    with torch.device("meta"):  # it borrows the centroids
        exact = TopKRouter.Config(
            dim=config.dim,
            num_experts=config.num_experts,
            top_k=config.top_k,
            jitter_std=0.0,
            normalize_centroids=config.normalize_centroids,
        ).build()
    exact.centroids = router.centroids
    hidden = args[0] if args else kwargs["hidden"]
    mask = args[1] if len(args) > 1 else kwargs.get("mask")
    return exact.eval()(hidden, mask)


def _largest_norm(rows: Tensor) -> float:
    rows = full_tensor(rows)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return float(torch.linalg.vector_norm(rows, dim=1, dtype=dtype).max())
