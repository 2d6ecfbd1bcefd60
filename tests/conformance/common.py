"""Small routers of every kind, and the same routing by the library and by the oracles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import airmoe
from airmoe import ROUTERS, CellRouting, ExpertRouting, TokenRouting
from tests import oracles
from tests.oracles import Choices

Mode = Literal["train", "eval"]

SIZES = {"dim": 8, "num_experts": 16, "top_k": 4, "jitter_std": 0.0}
EXTRA: dict[str, dict[str, Any]] = {
    "air": {"num_codewords": 3, "shortlist_size": 9},
    "peer": {"num_heads": 2},
    "hierarchical": {"num_clusters": 4, "num_selected_clusters": 2},
    "topk": {},
    "expert_choice": {},
}


@dataclass
class Case:
    """One router configuration, with its routing by the paper's formulas."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def config(self) -> dict[str, Any]:
        return {**SIZES, **EXTRA[self.name], **self.options}

    def build(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        router_class: Any = ROUTERS[self.name]
        return router_class.Config(**self.config).build()

    @property
    def token_choice(self) -> bool:
        return self.name != "expert_choice" and self.config.get("gate") != "expert_choice"

    def choices(self, router: Any, hidden: Tensor, params: dict[str, Tensor]) -> Choices:
        """The oracle's routing of `hidden` with `params`; AIR's lists are the router's own."""
        config = self.config
        top_k, normalize = config["top_k"], config.get("normalize_centroids", True)
        if self.name == "peer":
            return oracles.peer_route(hidden, params["query.weight"], params["keys"], top_k)
        if self.name == "hierarchical":
            return oracles.hierarchical_route(
                hidden,
                params["cluster_centroids"],
                params["centroids"],
                top_k,
                config["num_selected_clusters"],
                normalize,
            )
        if self.name == "air":
            return oracles.air_route(
                hidden,
                router.codebook.codewords.to(hidden.dtype),
                router.shortlists().tolist(),
                params["centroids"],
                top_k,
                normalize=normalize,
                kind="euclidean" if config.get("codebook") == "euclidean" else "spherical",
            )
        return oracles.exact_topk(hidden, params["centroids"], top_k, normalize)

    def at_selection(self, choices: Choices, routing: Any) -> Choices:
        """The oracle's routing, at the library's selection."""
        selected = selected_ids(routing)
        if not self.token_choice:
            return oracles.fix_selection(choices, dict(enumerate(selected)))
        top_k, fixed = self.config["top_k"], []
        for token, heads in enumerate(choices):
            if heads is None:
                fixed.append(None)
                continue
            per_head = top_k // len(heads)
            ids = selected[token]
            if len(heads) > 1:  # PEER concatenates its heads
                ids = routing.expert_ids[token].tolist()
            parts = [ids[p * per_head : (p + 1) * per_head] for p in range(len(heads))]
            fixed.append(
                [
                    oracles.choose(choice.candidate_ids, choice.logits, per_head, part)
                    for choice, part in zip(heads, parts, strict=True)
                ]
            )
        return fixed


def all_logits(case: Case, hidden: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Jitter-free logits over all experts by broadcasting: [T, E], for PEER [T, P, E]."""
    if case.name == "peer":
        num_heads, _, _, half = params["keys"].shape
        queries = (hidden @ params["query.weight"].T).view(-1, num_heads, 2, half)
        scores = torch.einsum("tphd,phsd->tphs", queries, params["keys"])
        return (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).flatten(2)
    normalize = case.config.get("normalize_centroids", True)
    logits = hidden @ oracles.project(params["centroids"], normalize).T
    if case.name == "hierarchical":
        clusters = hidden @ oracles.project(params["cluster_centroids"], normalize).T
        logits = logits + clusters.repeat_interleave(logits.shape[1] // clusters.shape[1], dim=1)
    return logits


def candidates(case: Case, router: Any, hidden: Tensor) -> Tensor:
    """[T, E] bool: the experts a token may choose from, by definition, in float64."""
    hidden, config = hidden.detach().double(), case.config
    everyone = torch.ones(len(hidden), config["num_experts"], dtype=torch.bool)
    if case.name == "air":
        codewords = router.codebook.codewords.double()
        nearest = (hidden @ oracles.project(codewords).T).argmax(1)
        scores = codewords @ oracles.project(router.centroids.detach().double()).T
        lists = scores.topk(config["shortlist_size"]).indices
        return torch.zeros_like(everyone).scatter(1, lists[nearest], True)
    if case.name == "hierarchical":
        clusters = hidden @ oracles.project(router.cluster_centroids.detach().double()).T
        chosen = torch.zeros_like(clusters, dtype=torch.bool)
        chosen.scatter_(1, clusters.topk(config["num_selected_clusters"]).indices, True)
        return chosen.repeat_interleave(config["num_experts"] // config["num_clusters"], dim=1)
    return everyone


def granular(**options: Any) -> Any:
    return airmoe.GranularExperts(**options)


def coarse(**options: Any) -> Any:
    return airmoe.CoarseExperts(**options)


def leaves(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters as independent leaves of another dtype."""
    named = module.named_parameters()
    return {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in named}


def tokens(count: int, dim: int, seed: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def probe(dense: Tensor, probs: Tensor, log_z: Tensor) -> Tensor:
    """One number that depends on everything a routing gives, with fixed random weights."""
    loss = (dense * tokens(len(dense), dense.shape[1], 31).to(dense.dtype)).sum()
    loss = loss + 3 * (probs * tokens(1, len(probs), 32)[0].to(dense.dtype)).sum()
    return loss + 0.1 * (log_z * tokens(1, len(log_z), 33)[0].to(dense.dtype)).sum()


def route(router: Any, hidden: Tensor, mode: Mode, mask: Tensor | None = None) -> Any:
    """One routing; in train mode after the micro-batch was observed, as MoELayer does."""
    router.train(mode == "train")
    if mode == "train":
        router.observe(hidden.detach(), mask)
    return router(hidden, mask)


def set_codebook(router: Any, codewords: Tensor, counts: Tensor | None = None) -> None:
    """Start the codebook from given codewords (and counts; sums follow)."""
    book = router.codebook
    counts = torch.full((len(codewords),), 4.0) if counts is None else counts
    with torch.no_grad():
        book.codewords.copy_(codewords)
        book.counts.copy_(counts)
        book.sums.copy_(codewords * counts[:, None])
        book.initialized.fill_(True)
    router.on_parameters_changed()


def row_cells(routing: CellRouting) -> Tensor:
    """The cell of every row [N]."""
    rows = torch.arange(len(routing.token_ids))
    return torch.searchsorted(routing.offsets, rows, right=True) - 1


def dense_weights(routing: Any) -> Tensor:
    """The weights of any routing as [T, E], read from its own representation."""
    dense = torch.zeros(routing.num_tokens, routing.num_experts)
    if isinstance(routing, TokenRouting):
        return dense.scatter_add(1, routing.expert_ids, routing.weights)
    if isinstance(routing, CellRouting):
        pools = routing.pools[row_cells(routing)]
        index = (routing.token_ids[:, None].expand_as(pools), pools)
        return dense.index_put(index, routing.gates, accumulate=True)
    assert isinstance(routing, ExpertRouting)
    experts = torch.arange(routing.num_experts)[:, None].expand_as(routing.token_ids)
    return dense.index_put((routing.token_ids, experts), routing.weights, accumulate=True)


def selected_ids(routing: Any) -> list[list[int]]:
    """The experts of every token, ascending."""
    return [row.nonzero().flatten().tolist() for row in dense_weights(routing).detach()]
