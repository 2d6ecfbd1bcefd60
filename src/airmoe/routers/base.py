"""The one interface of all routers, and what they share: input checks, counters, plans."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count, check_number, config
from airmoe.distributed import is_distributed, rank
from airmoe.errors import ConfigError
from airmoe.kernels.noise import Noise, Stage, combine, make_noise
from airmoe.routers.routing import Routing

CentroidInit = Literal["unit", "xavier"]

# Under torch.compile routing runs eagerly, as a break in the graph: the reference kernels loop over
# cells, which a compiler would unroll anew for every batch. (torch.compiler.disable does the same
# but loads the whole compiler when this module is imported.)
run_eagerly = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]


@config
class RouterConfig:
    """What every router needs to know."""

    label: ClassVar[str] = "router"

    dim: int
    num_experts: int
    top_k: int
    jitter_std: float = 0.01

    def check(self) -> None:
        for name in ("dim", "num_experts", "top_k"):
            check_count(f"{self.label}.{name}", getattr(self, name))
        check_number(f"{self.label}.jitter_std", self.jitter_std)
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"{self.label}.top_k",
                self.top_k,
                f"must be <= num_experts = {self.num_experts}",
                "Lower top_k or raise num_experts.",
            )

    def build(self) -> Router:
        raise TypeError(f"{type(self).__qualname__} belongs to no router")


@dataclass(frozen=True)
class Tokens:
    """Checked input: rows that do not count are set to 0 so that they can spoil nothing."""

    hidden: Tensor  # [T, D]
    valid: Tensor  # [T] bool

    @property
    def weights(self) -> Tensor:
        """[T] float32, 1 / (number of valid tokens) for each valid token, else 0."""
        valid = self.valid.float()
        return valid / valid.sum().clamp_min(1)


@dataclass(frozen=True)
class Plan:
    """What an answer depends on besides hidden states and parameters.

    Fixed when a micro-batch is first seen, so that a recomputed forward (activation
    checkpointing) gives the same answer although the router has moved on since.
    """

    noise_key: Tensor | None  # int64 scalar, None without jitter


class Router(nn.Module, ABC):
    """hidden [T, D] -> Routing. Pure: at the same micro-batch counter it gives the same answer
    and changes no state. `observe` is where gradient-free learning happens."""

    config: Any  # a RouterConfig, narrowed by each router

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("noise_seed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("micro_batches", torch.zeros((), dtype=torch.int64))
        self.noise_seed: Tensor
        self.micro_batches: Tensor
        self.parameter_changes = 0
        self._tracked_as: int | None = None
        self._warned_non_finite = False
        self.register_load_state_dict_post_hook(_after_load)

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its starting value (also after a meta-device build)."""
        self.noise_seed.copy_(torch.randint(2**62, ()))
        self.micro_batches.zero_()
        self.on_parameters_changed()

    @abstractmethod
    def route(self, tokens: Tokens, plan: Any) -> Routing:
        """The answer for checked tokens under a plan of this router."""

    @abstractmethod
    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free logits over all experts, [T, D] -> [T, E]: for metrics and tests."""

    def plan(self, tokens: Tokens) -> Plan:
        """Everything `route` needs besides tokens and parameters, as it is now."""
        return Plan(self.current_noise_key())

    @run_eagerly
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Routing:
        """hidden [T, D], mask [T] bool (False = padding) -> Routing."""
        tokens = self.read(hidden, mask)
        return self.answer(tokens, self.plan(tokens))

    def answer(self, tokens: Tokens, plan: Plan) -> Routing:
        """`route` in full precision whatever autocast says: selection is on float32 scores."""
        with torch.autocast(tokens.hidden.device.type, enabled=False):
            return self.route(tokens, plan)

    @run_eagerly
    def observe(self, hidden: Tensor, mask: Tensor | None = None) -> None:
        """Learn from one training micro-batch without gradients, and move the noise on."""
        tokens = self.read(hidden.detach(), mask)
        if tokens.hidden.shape[0] == 0 and not is_distributed():
            return
        self._warn_if_non_finite(hidden.detach(), mask)
        # Ranks must count alike even when one of them has no token this time.
        moved = 1 if is_distributed() else tokens.valid.any()
        self.micro_batches += moved
        self.learn(tokens)

    def learn(self, tokens: Tokens) -> None:
        """Gradient-free learning of this router; most have none."""

    def on_parameters_changed(self) -> None:
        """After an optimizer step or a load: derived caches are out of date."""
        self.parameter_changes += 1

    @property
    def tracked(self) -> bool:
        """True when an optimizer's hook reports parameter changes to this very object.

        A deep copy is another object that no hook knows, hence the comparison of identities.
        """
        return self._tracked_as == id(self)

    def set_tracked(self, tracked: bool) -> None:
        """Called by `track_optimizer`."""
        self._tracked_as = id(self) if tracked else None

    def read(self, hidden: Tensor, mask: Tensor | None) -> Tokens:
        """Check the input and find the tokens that count."""
        label, dim = self.config.label, self.config.dim
        if hidden.ndim != 2 or hidden.shape[1] != dim:
            raise ConfigError(
                f"{label}.hidden",
                tuple(hidden.shape),
                f"must have shape [tokens, dim = {dim}]",
                "Flatten leading dimensions, or build the router with the model's width.",
            )
        if not hidden.is_floating_point():
            raise ConfigError(
                f"{label}.hidden", hidden.dtype, "must be real floating point", "Cast it first."
            )
        valid = hidden.detach().isfinite().all(-1)
        if mask is not None:
            valid = valid & self._checked_mask(mask, hidden)
        return Tokens(hidden.masked_fill(~valid.unsqueeze(-1), 0), valid)

    def _checked_mask(self, mask: Tensor, hidden: Tensor) -> Tensor:
        if mask.dtype != torch.bool or mask.shape != hidden.shape[:1]:
            raise ConfigError(
                f"{self.config.label}.mask",
                (tuple(mask.shape), mask.dtype),
                f"must be a bool tensor of shape [{hidden.shape[0]}]",
                "Give True for real tokens and False for padding.",
            )
        return mask

    def _warn_if_non_finite(self, hidden: Tensor, mask: Tensor | None) -> None:
        # Reading a flag would stall a GPU, so only the CPU looks; statistics are safe on both.
        if self._warned_non_finite or hidden.device.type != "cpu":
            return
        bad = ~hidden.isfinite().all(-1)
        if mask is not None:
            bad &= mask
        if bool(bad.any()):
            self._warned_non_finite = True
            warnings.warn(
                f"{int(bad.sum())} of {bad.numel()} tokens hold NaN or infinity; they are left "
                "out of every routing statistic. Look for the layer that produced them.",
                stacklevel=3,
            )

    def current_noise_key(self) -> Tensor | None:
        """This micro-batch's key on this rank, or None when there is no jitter."""
        if not self.training or self.config.jitter_std == 0:
            return None
        return combine(self.noise_seed, self.micro_batches, rank())

    def noise(self, plan: Plan, stage: Stage, num_rows: int) -> Noise | None:
        """Jitter of one stage under a plan."""
        if plan.noise_key is None:
            return None
        return make_noise(plan.noise_key, stage, num_rows, self.config.jitter_std)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in vars(self.config).items())


def _after_load(module: nn.Module, _incompatible: object) -> None:
    assert isinstance(module, Router)
    module.on_parameters_changed()


def init_centroids(centroids: Tensor, kind: CentroidInit) -> None:
    """Unit-norm Gaussian directions, or Xavier as the paper's listing has it."""
    with torch.no_grad():
        if kind == "xavier":
            nn.init.xavier_uniform_(centroids)
        else:
            nn.init.normal_(centroids)
            centroids /= centroids.norm(dim=-1, keepdim=True)


def unit_rows(rows: Tensor) -> Tensor:
    """Projection onto the unit sphere (Alg. 1, line 1), functional and differentiable.

    The parameter keeps its own norm; a zero row stays zero instead of becoming NaN.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows * inverse_norms(rows).unsqueeze(-1)


def inverse_norms(rows: Tensor) -> Tensor:
    """1/|w_e| in float32 or wider, 0 for a zero row: [E, D] -> [E]."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    square = rows.square().sum(-1)
    safe = square.where(square > 0, torch.ones_like(square))
    return safe.rsqrt() * (square > 0)


def check_centroids(label: str, centroid_init: str) -> None:
    check_choice(f"{label}.centroid_init", centroid_init, CentroidInit)
