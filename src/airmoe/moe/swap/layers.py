"""Routers with a codebook, seen alike by calibration: swapped ones and AirRouters."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError
from airmoe.moe.swap.codebook import ScaledCodebook
from airmoe.moe.swap.router import ShortlistRouter
from airmoe.routers.air import AirRouter
from airmoe.routers.codebook import Codebook
from airmoe.routers.topk import TopKRouter


class Layer(Protocol):
    """A router whose codebook can be fitted."""

    name: str
    module: Any  # the router
    dim: int
    num_experts: int
    num_codewords: int
    shortlist_size: int
    least_size: int  # the smallest shortlist that its rules allow
    keeps_candidates: bool  # one of the exact top-K that is a candidate is always chosen

    def new_codebook(self, num_codewords: int) -> Codebook:
        """One of its kind that learns by whole steps of k-means."""
        ...

    def representatives(self, codebook: Codebook) -> Tensor:
        """The token each codeword stands for: [G, D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Exact: [T, D] -> [T, E]."""
        ...

    def ranking(self, representatives: Tensor) -> Tensor:
        """Experts by promise, best first: [G, D] -> [G, E]."""
        ...

    def masses(self, logits: Tensor) -> Tensor:
        """The routing distribution: [T, E] -> [T, E]."""
        ...

    def chosen(self, logits: Tensor) -> Tensor:
        """The experts that logits (-inf: no candidate) select: [T, E] -> [T, K]."""
        ...

    def largest_norm(self) -> float:
        """The largest length of an expert's centroid."""
        ...

    def route_exactly(self, exactly: bool) -> None:
        """Score every expert until told otherwise, where the codebook cannot be relied on."""
        ...

    def install(self, fitted: Codebook) -> None:
        """Take over what a codebook of the same size has learned."""
        ...


class SwappedLayer:
    def __init__(self, name: str, router: ShortlistRouter) -> None:
        self.name = name
        self.module: Any = router
        self.dim, self.num_experts = router.hidden_dim, router.num_experts
        self.num_codewords = router.codebook.num_codewords
        self.shortlist_size = router.shortlist_size
        self.keeps_candidates = router.keeps_candidates
        self.least_size = min(router.least_shortlist(router), router.num_experts)

    def new_codebook(self, num_codewords: int) -> ScaledCodebook:
        return ScaledCodebook(num_codewords, self.dim)

    def representatives(self, codebook: Codebook) -> Tensor:
        assert isinstance(codebook, ScaledCodebook)
        return codebook.representatives()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.module.full_logits(hidden)

    def ranking(self, representatives: Tensor) -> Tensor:
        return self.module.ranking(representatives)

    def masses(self, logits: Tensor) -> Tensor:
        return self.module.masses(logits)

    def chosen(self, logits: Tensor) -> Tensor:
        return self.module.select(logits, logits.dtype)[1]

    def largest_norm(self) -> float:
        return _largest_norm(self.module.weight)

    def route_exactly(self, exactly: bool) -> None:
        # Also a calibrated one: the codebook is fitted to what exact routing shows the layers.
        self.module.scores_everything = exactly

    def install(self, fitted: Codebook) -> None:
        _install(self.module.codebook, fitted)


class AirLayer:
    def __init__(self, name: str, router: AirRouter) -> None:
        config = router.config
        self.name, self.config = name, config
        self.module: Any = router
        self.dim, self.num_experts = config.dim, config.num_experts
        self.num_codewords, self.shortlist_size = config.num_codewords, config.shortlist_size
        self.least_size = config.top_k
        self.keeps_candidates = True
        self._hook: Any = None  # in place while its answers are exact

    def new_codebook(self, num_codewords: int) -> Codebook:
        return Codebook(num_codewords, self.dim, self.config.codebook, decay=0.0)

    def representatives(self, codebook: Codebook) -> Tensor:
        return codebook.codewords

    def logits(self, hidden: Tensor) -> Tensor:
        return self.module.full_logits(hidden)

    def ranking(self, representatives: Tensor) -> Tensor:
        return self.logits(representatives).argsort(dim=-1, descending=True, stable=True)

    def masses(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def chosen(self, logits: Tensor) -> Tensor:
        return logits.topk(self.config.top_k, dim=-1).indices

    def largest_norm(self) -> float:
        return 1.0 if self.config.normalize_centroids else _largest_norm(self.module.centroids)

    def route_exactly(self, exactly: bool) -> None:
        """A router that was trained goes on with its own routing: it is what its model knows."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        untaught = not bool(self.module.codebook.initialized)
        if exactly and untaught and self.config.gate != "expert_choice":
            self._hook = self.module.register_forward_hook(_exact_answer, with_kwargs=True)

    def install(self, fitted: Codebook) -> None:
        _install(self.module.codebook, fitted)


def find_layers(model: nn.Module) -> list[Layer]:
    """Every router of a model that has a codebook."""
    found: list[Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, ShortlistRouter):
            found.append(SwappedLayer(name, module))
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
        if any(tensor.is_meta for tensor in layer.module.state_dict().values()):
            raise ConfigError(
                "calibrate.model",
                f"{layer.name!r} on the meta device",
                "must have the weights of its routers in memory",
                "Load the model without offloading it to CPU or disk, then calibrate.",
            )
    return found


def _exact_answer(
    router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any
) -> Any:
    """The routing over all experts, in the place of what an untaught AirRouter says."""
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


def _install(codebook: Codebook, fitted: Codebook) -> None:
    state = fitted.state_dict()
    state["seed"] = codebook.seed.clone()  # of the noise, which is not learned
    codebook.load_state_dict(state)


def _largest_norm(rows: Tensor) -> float:
    rows = full_tensor(rows)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return float(torch.linalg.vector_norm(rows, dim=1, dtype=dtype).max())
