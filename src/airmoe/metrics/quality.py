"""Routing quality against exact routing: overlap, mass recall, the bound of Prop. 1.

Every function runs the router in evaluation mode (no jitter), without gradients, and changes none
of its state. Exact logits are computed for a chunk of tokens at a time, never as one tokens x
experts tensor. Masked and non-finite tokens get NaN, so `nanmean` is the mean over valid tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError
from airmoe.routers.air import AirRouter
from airmoe.routers.base import Router
from airmoe.routers.peer import PeerRouter

ALL = slice(None)
CHUNK_BYTES = 256 * 2**20  # scratch memory for the exact logits of some tokens


@dataclass(frozen=True, kw_only=True)
class RoutingQuality:
    """What the router found of the exact routing, for each token that was compared."""

    overlap: Tensor  # [T] float32
    mass_recall: Tensor  # [T] float32
    valid: Tensor  # [T] bool; the other tokens have NaN


def overlap(router: Router, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the exact top-K that the router picks, per token [T] float32, in [0, 1].

    The exact top-K is that of the jitter-free logits of all experts. Of experts tied at the K-th
    place, any choice counts in full.
    """
    return routing_quality(router, hidden, mask).overlap


def mass_recall(router: Router, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the full routing distribution that lies on the router's candidates, [T] float32.

    MassRecall(h) = sum over the shortlist of softmax(full logits); paper, section 3.3.
    """
    return routing_quality(router, hidden, mask).mass_recall


@torch.no_grad()
def routing_quality(
    router: Router, hidden: Tensor, mask: Tensor | None = None, *, rows: slice = ALL
) -> RoutingQuality:
    """Overlap and mass recall from one routing and one pass over the exact logits.

    All tokens are routed, because with expert choice they compete, but only `rows` are compared.
    """
    if not isinstance(router, Router):
        rule = "must be a router, with the hidden states it gets"
        remedy = "For a layer give layer.router and x.flatten(0, -2)."
        raise ConfigError("overlap and mass recall: router", type(router).__name__, rule, remedy)
    if isinstance(router, PeerRouter):
        raise ValueError(
            "overlap and mass recall: got a PeerRouter, need a router that approximates one list "
            "of exact logits, because PEER's selection per head is exact by construction. Report "
            "its usage (RoutingMeter.update) instead."
        )
    # As an FSDP2 unit of its own a router gathers in forward.
    gathered = nullcontext() if hasattr(router, "unshard") else _whole_parameters(router)
    with router_mode(router, training=False):
        with gathered:
            routing = router(hidden, mask)
        valid, log_z = routing.valid[rows], routing.log_z.detach()[rows]  # [t], [t]
        chosen = routing.to_token_routing()
        picked = torch.where(chosen.weights[rows] > 0, chosen.expert_ids[rows], -1)  # [t, n]
        compared = hidden[rows]
        overlaps, recalls = (torch.full_like(log_z, torch.nan) for _ in range(2))
    with router_mode(router, training=False), _whole_parameters(router):
        for part in _chunks(valid.nonzero().squeeze(1), router):
            logits = router.full_logits(compared[part])  # [part, E]
            found = _overlap_with_exact(logits, picked[part], router.config.top_k)
            overlaps[part] = found.to(log_z)
            recalls[part] = (log_z[part] - logits.logsumexp(dim=1)).exp()
    return RoutingQuality(overlap=overlaps, mass_recall=recalls, valid=valid)


@torch.no_grad()
def mass_recall_bound(router: AirRouter, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mass recall that Prop. 1 guarantees, exp(-2 |w| eps) rho_M(c), per token [T] float32.

    eps = |h - c(h)| is the quantisation error, rho_M(c) the mass recall of the codeword itself, and
    |w| the largest centroid norm (1 if centroids are normalised, as in the paper). The bound holds
    for any h, but is close to 0 if |h| is far from the codeword's norm: pass unit-norm tokens.
    """
    if not isinstance(router, AirRouter):
        raise ValueError(
            f"mass_recall_bound: got a {type(router).__name__}, needs an AirRouter, because Prop. "
            "1 is about codewords and their shortlists. Use mass_recall instead."
        )
    with router_mode(router, training=False), _whole_parameters(router):
        valid = router.read(hidden, mask).valid  # [T]
        work = torch.promote_types(hidden.dtype, torch.float32)
        tokens = hidden[valid].to(work)  # [t, D]
        used, codeword_ids = router.codebook.assign(tokens).unique(return_inverse=True)
        codewords = router.codebook.codewords[used]  # [g, D]
        captured = _shortlist_mass(router, codewords, router.shortlists()[used])  # [g]
        error = (tokens - codewords[codeword_ids]).norm(dim=1)  # [t]
        bound = torch.full(valid.shape, torch.nan, dtype=work, device=hidden.device)
        bound[valid] = (-2 * _largest_norm(router) * error).exp() * captured[codeword_ids]
    return bound


@contextmanager
def router_mode(router: Router, *, training: bool) -> Iterator[None]:
    """`mode_of` a router. Autocast is off, because it would round the exact logits."""
    off = torch.autocast(router.micro_batches.device.type, enabled=False)
    with mode_of(router, training=training), off:
        yield


@contextmanager
def mode_of(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a block in training or evaluation mode, then restore every submodule's own flag."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _whole_parameters(router: Router) -> Iterator[None]:
    """Gather sharded parameters (FSDP2) once; ranks may need different numbers of chunks."""
    sharded = []
    for module in router.modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = full_tensor(parameter)
            if whole is not parameter:
                sharded.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            module._parameters[name] = parameter


def _overlap_with_exact(logits: Tensor, picked: Tensor, num_active: int) -> Tensor:
    """Share of the num_active largest logits [t, E] found among picked [t, n] (-1 = unused slot).

    Compares logits, not ids, so that any of the experts tied at the K-th place may fill it.
    """
    largest = logits.topk(num_active, dim=1).values  # [t, K]
    smallest = largest[:, -1:]
    places_for_ties = (largest == smallest).sum(dim=1)
    found = logits.gather(1, picked.clamp(min=0)).masked_fill(picked < 0, -torch.inf)  # [t, n]
    above = (found > smallest).sum(dim=1)
    tied = (found == smallest).sum(dim=1).minimum(places_for_ties)
    return (above + tied).to(torch.float32) / num_active


def _shortlist_mass(router: AirRouter, codewords: Tensor, shortlists: Tensor) -> Tensor:
    """rho_M(c): share of a codeword's own routing distribution on its shortlist, [g]."""
    mass = codewords.new_empty(codewords.shape[0], dtype=torch.float32)
    for rows in _chunks(torch.arange(codewords.shape[0], device=codewords.device), router):
        logits = router.full_logits(codewords[rows])  # [g, E]
        inside = logits.gather(1, shortlists[rows]).logsumexp(dim=1)
        mass[rows] = (inside - logits.logsumexp(dim=1)).exp()
    return mass


def _largest_norm(router: AirRouter) -> Tensor | float:
    if router.config.normalize_centroids:
        return 1.0
    wide = torch.promote_types(router.centroids.dtype, torch.float32)
    return torch.linalg.vector_norm(router.centroids, dim=1, dtype=wide).max()


def _chunks(rows: Tensor, router: Router) -> tuple[Tensor, ...]:
    """Split row numbers so that the exact logits of one part fit the memory budget."""
    logit_bytes = router.config.num_experts * 4
    # `full_logits` copies the centroids to normalise them, so a chunk may be as large as that copy.
    budget = max(CHUNK_BYTES, router.config.dim * logit_bytes)
    # Logits, their exponentials and the scratch of top-k exist at the same time.
    return rows.split(max(1, budget // (3 * logit_bytes)))
