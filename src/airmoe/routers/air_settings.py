"""Settings of AIR, and which of them go together."""

from __future__ import annotations

from typing import Literal, Self

from airmoe.config import check_choice, check_count, check_number, config
from airmoe.errors import ConfigError
from airmoe.routers.centroids import CentroidConfig
from airmoe.routers.codebook import CodebookKind

Gate = Literal["token_choice", "expert_choice", "binary"]


@config
class AirSettings(CentroidConfig):
    """Settings of AIR.

    `gate`: with "token_choice" a token takes its K best and weighs them by softmax; "binary" is
    the same choice, but each of the K weighs 1 and the centroids learn nothing from the output
    (for experts taken from a dense network); with "expert_choice" experts take tokens.
    """

    num_codewords: int
    shortlist_size: int
    codebook_decay: float = 0.95
    dead_below: float = 1.0
    codebook: CodebookKind = "spherical"
    gate: Gate = "token_choice"
    capacity_factor: float = 1.0  # of the expert-choice gate
    refresh_every: int = 1  # optimizer steps between two buildings of the shortlists

    def check(self) -> None:
        super().check()
        for name in ("num_codewords", "shortlist_size", "refresh_every"):
            check_count(f"{self.label}.{name}", getattr(self, name))
        check_number(f"{self.label}.codebook_decay", self.codebook_decay, below=1.0)
        check_number(f"{self.label}.dead_below", self.dead_below)
        check_number(f"{self.label}.capacity_factor", self.capacity_factor, strict=True)
        check_choice(f"{self.label}.codebook", self.codebook, CodebookKind)
        check_choice(f"{self.label}.gate", self.gate, Gate)
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.shortlist_size < self.top_k:
            raise ConfigError(
                f"{self.label}.shortlist_size",
                self.shortlist_size,
                f"must be >= top_k = {self.top_k}, because the K active experts come from "
                "one shortlist",
                "Raise shortlist_size or lower top_k.",
            )
        if self.shortlist_size > self.num_experts:
            raise ConfigError(
                f"{self.label}.shortlist_size",
                self.shortlist_size,
                f"must be <= num_experts = {self.num_experts}",
                "Lower shortlist_size or raise num_experts.",
            )
        if self.gate != "expert_choice" and self.capacity_factor != 1.0:
            raise ConfigError(
                f"{self.label}.capacity_factor",
                self.capacity_factor,
                'only has a meaning with gate = "expert_choice"',
                'Leave it at 1.0 or set gate="expert_choice".',
            )

    @classmethod
    def for_budget(cls, *, dim: int, num_experts: int, top_k: int) -> Self:
        """Shortlists of 4 K experts, and a codeword for every 64 experts, at most 1024."""
        return cls(
            dim=dim,
            num_experts=num_experts,
            top_k=top_k,
            num_codewords=max(1, min(1024, num_experts // 64)),
            shortlist_size=min(num_experts, 4 * top_k),
        )
