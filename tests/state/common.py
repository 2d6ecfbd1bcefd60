"""Small routers and layers of every kind, and ways to compare their whole state bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import airmoe
from airmoe import ROUTERS, AirRouter, GranularExperts, MoELayer
from airmoe.distributed import full_tensor
from tests.conformance import common

DIM, EXPERTS, TOP_K = 8, 36, 4
SIZES: dict[str, Any] = {"dim": DIM, "num_experts": EXPERTS, "top_k": TOP_K, "jitter_std": 0.3}
EXTRA = {**common.EXTRA, "air": {**common.EXTRA["air"], "codebook_decay": 0.7}}
# Every router of the table, and AIR's extensions: (router, options).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ROUTERS},
    "air-expert-choice": ("air", {"gate": "expert_choice"}),
    "air-euclidean": ("air", {"codebook": "euclidean"}),
    "air-raw-centroids": ("air", {"normalize_centroids": False}),
    "air-refresh-every": ("air", {"refresh_every": 2, "num_codewords": 5, "shortlist_size": 20}),
}


def build_router(case: str = "air", seed: int = 0, **options: Any) -> Any:
    """A router whose every random choice comes from `seed`."""
    name, more = CASES[case]
    torch.manual_seed(seed)
    router_class: Any = ROUTERS[name]
    return router_class.Config(**{**SIZES, **EXTRA[name], **more, **options}).build()


def build_layer(case: str = "air", seed: int = 0, **options: Any) -> Any:
    """A MoELayer; `Any`, because tests reach into whichever router it holds."""
    router = build_router(case, seed, **options)
    experts = GranularExperts(router.config.num_experts, router.config.dim)
    return MoELayer(router, experts)


def tracked_layer(**options: Any) -> tuple[MoELayer, AirRouter, torch.optim.Optimizer]:
    """A layer of AIR, its router, and the optimizer that it tracks: keep it, or tracking ends."""
    layer = build_layer("air", **options)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.3)
    airmoe.track_optimizer(layer, optimizer)
    return layer, layer.router, optimizer


class Block(nn.Module):
    """A layer deep inside a block: Linear, dropout, MoE, Linear, residual."""

    def __init__(self, layer: Any, dropout: float = 0.1) -> None:
        super().__init__()
        dim = layer.experts.dim
        self.before, self.after = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout, self.layer = nn.Dropout(dropout), layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.layer(self.dropout(self.before(x))))


def build_block(case: str = "air", seed: int = 0, **options: Any) -> Block:
    return Block(build_layer(case, seed, **options))


def batch(index: int, *shape: int) -> Tensor:
    """Micro-batch number `index`, the same in every run."""
    shape = shape or (2, 11)
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1000 + index))


def routers_of(model: nn.Module) -> list[airmoe.Router]:
    return [module for module in model.modules() if isinstance(module, airmoe.Router)]


def air_of(model: nn.Module) -> AirRouter:
    (router,) = routers_of(model)
    assert isinstance(router, AirRouter)
    return router


def snapshot(module: nn.Module, *, derived: bool = True) -> dict[str, Tensor]:
    """Copies of every parameter, gradient and buffer; without `derived` only what is saved."""
    tensors = dict(module.state_dict(keep_vars=True))
    if derived:
        tensors |= dict(module.named_buffers())
    grads = {f"{n}.grad": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {name: tensor.detach().clone() for name, tensor in {**tensors, **grads}.items()}


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """The same tensors, by name or in order, and the same bits in each."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def losses(output: airmoe.MoEOutput) -> Tensor:
    """Everything a training step may ask of a routing."""
    routing = output.routing
    loss = output.hidden.square().mean() + airmoe.load_balance_loss(routing)
    loss = loss + airmoe.losses.router_z_loss(routing)
    if isinstance(routing, airmoe.CellRouting):
        loss = loss + airmoe.losses.shortlist_balance_loss(routing)
    return loss


def plain_shortlists(router: AirRouter, codewords: Tensor | None = None) -> Tensor:
    """[G, M] jitter-free, from the definition (Alg. 1, lines 1 and 4-7)."""
    centroids = full_tensor(router.centroids).detach()
    if router.config.normalize_centroids:
        centroids = centroids / centroids.norm(dim=-1, keepdim=True)
    codewords = router.codebook.codewords if codewords is None else codewords
    best = (codewords @ centroids.T).topk(router.config.shortlist_size).indices
    return best.sort(-1).values


@contextmanager
def counting_observe(router: airmoe.Router) -> Iterator[list[int]]:
    """How many tokens each call of `observe` saw."""
    seen: list[int] = []
    original = router.observe

    def observe(hidden: Tensor, mask: Tensor | None = None) -> None:
        seen.append(hidden.shape[0])
        original(hidden, mask)

    router.observe = observe  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del router.observe  # the class's method shows again


def two_steps(model: Any, optimizer: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    """States of a language model after two steps of two micro-batches each.

    The second step holds both forwards before its backwards. The last router observes each
    micro-batch once.
    """
    states: dict[str, Tensor] = {}
    with counting_observe(routers_of(model)[-1]) as seen:
        for step in range(2):
            losses = []
            for ids in batches[2 * step : 2 * step + 2]:
                losses.append(model(input_ids=ids, labels=ids).loss)
                if step == 0:
                    losses.pop().backward()
            for loss in reversed(losses):
                loss.backward()
            states |= {f"{step}.{name}": value for name, value in snapshot(model).items()}
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [ids.numel() for ids in batches]
    return states


def checkpoint_activations(model: Any, use_reentrant: bool = False) -> None:
    """Switch activation checkpointing on, under the name that this transformers has for it."""
    current = hasattr(model, "activation_checkpointing_enable")
    enable = "activation_checkpointing_enable" if current else "gradient_checkpointing_enable"
    getattr(model, enable)({"use_reentrant": use_reentrant})
