"""The coarse stages that are compared, and what each of them would find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial

from torch import Tensor

from airmoe.experiments.recall_study import rankings
from airmoe.experiments.recall_study.cells import (
    Spread,
    cell_spread,
    cell_tokens,
    fitted_codebook,
    pooled_spread,
)
from airmoe.experiments.recall_study.overlap import exact_choices, overlaps
from airmoe.experiments.recall_study.record import Row, Stage, batch_tokens
from airmoe.experiments.suites.recall import Coarse
from airmoe.kernels.codeword_sums import directions
from airmoe.kernels.inverse_norms import unit_rows
from airmoe.metrics import unlisted_experts
from airmoe.routers import AirRouter
from airmoe.routers.codebook import Codebook

EIGHTHS_OF_SIZE = (4, 8, 12, 13, 16)  # of the run's M
PROBES = (1, 2, 4)
QUARTERS_OF_CODEWORDS = (1, 2, 4, 8, 16, 32)  # of the run's G
LEAST_TOKENS = 4  # per codeword of a fitted codebook
SELDOM = 16  # steps between two buildings of the lists, where they live long


@dataclass(frozen=True)
class CoarseStage:
    """One to be measured; nothing is computed before it is asked for."""

    stage: Stage
    codebook: Callable[[], Codebook]
    lists: Callable[[], Tensor]  # [G, M] for the largest M, best first
    probes: int = 1
    priced: bool = True  # whether codebook and lists are made as AIR's: of those the cost is known


class LayerStudy:
    """The stages of one MoE layer, measured on states its router saw."""

    def __init__(
        self,
        router: AirRouter,
        fit: Tensor,
        held_out: Tensor,
        *,
        tokens_per_step: int,
        seed: int,
    ) -> None:
        config = router.config
        self.router, self.config, self.seed = router, config, seed
        self.fit, self.held_out = router.centered(fit), router.centered(held_out)  # [T, D] each
        self.tokens_per_step = tokens_per_step
        self.refresh_share = config.num_experts / tokens_per_step
        centroids = router.centroids.detach().float()
        self.experts = unit_rows(centroids) if config.normalize_centroids else centroids  # [E, D]
        sizes = {config.shortlist_size * eighths // 8 for eighths in EIGHTHS_OF_SIZE}
        # A shorter list than K could not be trained: the K active experts come from it.
        self.sizes = sorted(size for size in sizes if config.top_k <= size <= config.num_experts)

    @cached_property
    def exact(self) -> Tensor:
        """[T, K] of the held-out states."""
        return exact_choices(self.held_out, self.experts, self.config.top_k)

    def stages(self) -> list[CoarseStage]:
        """All of them, the router's own number of probes first."""
        count, mine = self.config.num_codewords, self.config.probes
        probes = [mine, *(one for one in PROBES if one != mine and one <= count)]
        # The known cost has an update of the codebook in it.
        moves = self.config.codebook != "static"
        own = [
            CoarseStage("own", lambda: self.router.codebook, self._own, n, priced=moves)
            for n in probes
        ]
        codewords = {count * quarters // 4 for quarters in QUARTERS_OF_CODEWORDS} - {0}
        others = [n for n in sorted(codewords) if self.fit.shape[0] >= LEAST_TOKENS * n]
        fitted = []
        for number in others:
            codebook = cache(partial(fitted_codebook, self.fit, number, self.seed))
            fitted.append(CoarseStage("fitted", codebook, partial(self._ranked, codebook)))
            if number == count:
                fitted += self._of_tokens(codebook)
        return [*own, *fitted]

    def _of_tokens(self, codebook: Callable[[], Codebook]) -> Iterator[CoarseStage]:
        """Lists that are made from the tokens of each cell instead of its codeword."""
        cells = cache(lambda: cell_tokens(codebook(), self.fit))
        pooled = cache(lambda: pooled_spread(cells()))
        asked = (self.experts, self.config.top_k, self.sizes[-1])
        few = batch_tokens(self.tokens_per_step, self.config.num_codewords)

        def spread(of: Callable[[], Spread]) -> Callable[[], Tensor]:
            return lambda: rankings.by_spread(cells(), of(), *asked)

        makers: dict[Stage, Callable[[], Tensor]] = {
            "pooled_spread": spread(pooled),
            "cell_spread": spread(lambda: cell_spread(cells(), pooled())),
            "used": lambda: rankings.by_use(cells(), *asked),
            "used_batch": lambda: rankings.by_soft_use(cells(), pooled(), *asked, tokens=few),
        }
        for stage, lists in makers.items():
            yield CoarseStage(stage, codebook, lists, priced=False)

    def _own(self) -> Tensor:
        return self._ranked(lambda: self.router.codebook)

    def _ranked(self, codebook: Callable[[], Codebook]) -> Tensor:
        return rankings.by_codeword(codebook().codewords, self.experts, self.sizes[-1])

    def rows(self, one: CoarseStage) -> list[Row]:
        """A row per size of shortlist."""
        codebook, lists = one.codebook(), one.lists()
        num_experts = self.config.num_experts
        codeword_ids = codebook.nearest(self.held_out, one.probes)  # [T, probes]
        found = overlaps(self.exact, codeword_ids, lists, self.sizes, num_experts)
        cosine = self._cosine(codebook, codeword_ids) if one.probes == 1 else None
        return [
            Row(
                stage=one.stage,
                num_codewords=codebook.num_codewords,
                shortlist_size=size,
                probes=one.probes,
                overlap=share,
                unlisted_experts=unlisted_experts(lists[:, :size], num_experts),
                cosine=cosine,
                products_every_step=self._products(one, codebook.num_codewords, size, 1),
                products_every_16_steps=self._products(one, codebook.num_codewords, size, SELDOM),
            )
            for size, share in zip(self.sizes, found, strict=True)
        ]

    def _cosine(self, codebook: Codebook, codeword_ids: Tensor) -> float:
        nearest = directions(codebook.codewords)[codeword_ids[:, 0]]  # Euclidean ones have a length
        found = float((directions(self.held_out) * nearest).sum(1).mean())
        return max(-1.0, min(found, 1.0))  # rounding may lead beyond

    def _products(
        self, one: CoarseStage, num_codewords: int, size: int, refresh_every: int
    ) -> float | None:
        if not one.priced:
            return None
        cost = Coarse(num_codewords, size, one.probes, refresh_every, self.config.list_all)
        return cost.products(self.refresh_share)
