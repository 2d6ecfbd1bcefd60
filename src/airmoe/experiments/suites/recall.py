"""The recall suite: AIR nearer to exact routing, for the FLOPs that the preset's settings cost.

Per token AIR compares with G codewords twice (the codebook's update, then routing), pays its share
of the refresh, and scores probes x M candidates, which have gradients: three products each. All of
them are of length D, so what one saves another may spend. With r = experts / tokens per step:

    products = G (2 + r / refresh_every) + 3 probes M

With `list_all` a refresh compares twice: experts with codewords too, to find the nearest one.
`center_tokens` costs no product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from airmoe.errors import ConfigError
from airmoe.routers import AirRouter

LAZY_STEPS = 16  # of lists that live longer: nearly all of the refresh is saved
PER_CODEWORD, PER_CANDIDATE = 2, 3


@dataclass(frozen=True)
class Coarse:
    """The settings of AIR that decide how many products a token costs."""

    num_codewords: int
    shortlist_size: int
    probes: int
    refresh_every: int
    list_all: bool = False
    center_tokens: bool = False

    def products(self, refresh_share: float) -> float:
        """Per token; `refresh_share` is r above."""
        candidates = self.probes * self.shortlist_size
        return self.num_codewords * self.per_codeword(refresh_share) + PER_CANDIDATE * candidates

    def per_codeword(self, refresh_share: float) -> float:
        return PER_CODEWORD + refresh_share * (1 + self.list_all) / self.refresh_every

    def options(self) -> dict[str, Any]:
        return dict(vars(self))


def equal_cost(router: AirRouter.Config, tokens_per_step: int) -> dict[str, dict[str, Any]]:
    """Options of AIR that cost what `router` does, by variant; `air` is the router itself."""
    base = Coarse(router.num_codewords, router.shortlist_size, router.probes, router.refresh_every)
    extended = router.list_all or router.center_tokens
    if (base.probes, base.refresh_every, extended) != (1, 1, False):
        raise ConfigError(
            "suite",
            "recall",
            "starts from probes = 1, refresh_every = 1, list_all = center_tokens = false, and "
            "changes them",
            "Leave them out.",
        )
    share = router.num_experts / tokens_per_step
    budget = base.products(share)
    lazy = replace(base, refresh_every=LAZY_STEPS)
    variants = {
        "air": base,
        "probes": replace(base, probes=2, shortlist_size=base.shortlist_size // 2),
        "fewer_codewords": _longer(
            replace(base, num_codewords=base.num_codewords // 2), budget, share
        ),
        "lazy_longer": _longer(lazy, budget, share),
        "lazy_finer": _finer(lazy, budget, share),
        "lazy_all": replace(base, list_all=True, refresh_every=2),
        "centered": replace(base, center_tokens=True),
    }
    return {
        name: one.options()
        for name, one in variants.items()
        if router.top_k <= one.shortlist_size <= router.num_experts
        and one.num_codewords >= one.probes
        and (one.num_codewords * one.shortlist_size >= router.num_experts or not one.list_all)
    }


def _longer(one: Coarse, budget: float, share: float) -> Coarse:
    """Spend what is left on longer shortlists."""
    left = budget - one.products(share)
    more = int(left / (PER_CANDIDATE * one.probes))
    return replace(one, shortlist_size=one.shortlist_size + more)


def _finer(one: Coarse, budget: float, share: float) -> Coarse:
    """Spend what is left on more codewords."""
    left = budget - one.products(share)
    more = int(left / one.per_codeword(share))
    return replace(one, num_codewords=one.num_codewords + more)
