"""Settings that all routers share: sizes, checks, cost and rules of a fair comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from airmoe.config import check_choice, check_count, check_flag, check_number, config
from airmoe.errors import ConfigError
from airmoe.flops import RouterCount, RouterLosses, Workload

if TYPE_CHECKING:
    from airmoe.routers.base import Router

CentroidInit = Literal["unit", "xavier"]


@dataclass(frozen=True)
class Amount:
    """A number to compare, and how to write it in a table."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """What routers must have in common for a fair comparison (docs/suites.md). None: exempt."""

    active: Amount  # experts per token
    structure: Amount | None = None  # size of the first of two stages
    candidates: Amount | None = None  # experts scored per token


@config
class RouterConfig:
    """What every router needs to know."""

    label: ClassVar[str]  # how errors name it: as it is typed, AirRouter.Config

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "label" not in vars(cls):
            cls.label = cls.__qualname__.rpartition("<locals>.")[2]

    dim: int
    num_experts: int
    top_k: int
    jitter_std: float = 0.01

    @property
    def top_k_limit(self) -> int:
        """The most experts a token can choose."""
        return self.num_experts

    def fairness(self) -> Fairness:
        """Amounts that a router to be compared with this one must have too."""
        return Fairness(active=Amount(self.top_k, str(self.top_k)))

    def check(self) -> None:
        for name in ("dim", "num_experts", "top_k"):
            check_count(f"{self.label}.{name}", getattr(self, name))
        check_number(f"{self.label}.jitter_std", self.jitter_std)
        if self.top_k > self.top_k_limit:
            rule = f"must be <= {self.top_k_limit}, the experts a token can choose"
            raise self.error("top_k", rule, "Lower top_k or raise num_experts.")

    def error(self, name: str, rule: str, remedy: str) -> ConfigError:
        """The error for the setting `name`."""
        return ConfigError(f"{self.label}.{name}", getattr(self, name), rule, remedy)

    @classmethod
    def for_budget(cls, *, dim: int, num_experts: int, top_k: int) -> Self:
        """Settings derived from the three numbers that all routers share."""
        return cls(dim=dim, num_experts=num_experts, top_k=top_k)

    @classmethod
    def with_options(cls, options: Mapping[str, Any], **budget: int) -> Self:
        """The settings of `for_budget` (of a class without one: the defaults), except `options`."""
        if cls.for_budget.__func__ is RouterConfig.for_budget.__func__:
            return cls(**budget, **options)
        return dataclasses.replace(cls.for_budget(**budget), **options)

    def count_flops(self, workload: Workload, losses: RouterLosses) -> RouterCount:
        """Terms of the FLOP ledger for one layer, per token."""
        rule = "must be a router the ledger can count"
        remedy = "Give its Config a method `count_flops` (airmoe.flops)."
        raise ConfigError("flops.router", type(self).__qualname__, rule, remedy)

    def build(self) -> Router:
        raise TypeError(f"{type(self).__qualname__} belongs to no router")


@config
class CentroidConfig(RouterConfig):
    """Settings of routers with one centroid w_e per expert."""

    normalize_centroids: bool = True
    centroid_init: CentroidInit = "unit"

    def check(self) -> None:
        super().check()
        check_flag(f"{self.label}.normalize_centroids", self.normalize_centroids)
        check_choice(f"{self.label}.centroid_init", self.centroid_init, CentroidInit)
