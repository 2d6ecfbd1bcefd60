"""The interface of all routers, and what they share: counters, noise, plans, centroids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from airmoe.distributed import full_tensor, is_distributed, rank
from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.noise import Noise, Stage, combine, make_noise
from airmoe.kernels.norms import unit_rows
from airmoe.routers.planning import new_handle, traced_plan
from airmoe.routers.routing import Routing, Tokens, for_products, read_tokens
from airmoe.routers.settings import CentroidConfig, CentroidInit, RouterConfig

# Under torch.compile the reference kernels run eagerly, as a break in the graph: they loop over
# cells, which a compiler would unroll anew for every batch. (torch.compiler.disable does the same
# but loads the whole compiler when this module is imported.)
run_eagerly = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Plan:
    """What a routing depends on besides hidden states and parameters.

    Fixed when a micro-batch is first seen, so that a recomputed forward (activation
    checkpointing) gives the same routing although the codebook and the noise have moved on since.
    """

    noise_key: Tensor | None = None  # int64 scalar, None without jitter
    own_bytes: int = field(default=0, kw_only=True)  # of large tensors that only this plan holds


class Router(nn.Module, ABC):
    """hidden [T, D] -> Routing. A forward changes nothing but caches: calling it twice without
    `observe` in between gives the same routing. Learning without gradients happens in `observe`."""

    Config: ClassVar[type[RouterConfig]]  # beside each router, its own settings
    config: Any  # an instance of it
    plan_type: ClassVar[type[Plan]] = Plan  # what `plan` returns

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.noise_seed = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.micro_batches = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.parameter_changes = 0
        # Of tracked optimizers, to whose steps this router listens.
        self._step_hooks: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        # The same dict by another name: compilers assume that `_forward_hooks` never changes.
        self._forward_hooks_alias = self._forward_hooks
        self._handle = new_handle(self)
        self.register_load_state_dict_post_hook(_after_load)

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its starting value (also after a meta-device build)."""
        self.noise_seed.copy_(torch.randint(2**62, ()))
        self.micro_batches.zero_()
        self.on_parameters_changed()

    @abstractmethod
    def route(self, tokens: Tokens, plan: Any) -> Routing:
        """The routing of checked tokens under a plan of this router."""

    @abstractmethod
    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free logits over all experts, [T, D] -> [T, E]: for metrics and tests."""

    def plan(self, tokens: Tokens) -> Plan:
        """What `route` needs now besides tokens and parameters: the key of this micro-batch's
        jitter on this rank."""
        if not self.training or self.config.jitter_std == 0:
            return Plan()
        return Plan(combine(self.noise_seed, self.micro_batches, rank()))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        plan: Plan | None = None,
        tokens: Tokens | None = None,
    ) -> Routing:
        """hidden [T, D], mask [T] bool (False = padding) -> Routing.

        With the plan of an earlier forward this gives the routing of that forward. `tokens` are
        hidden and mask as `read` returned them, if they were read before. Autocast is off inside:
        selection is on float32 scores. On a GPU their products take operands in autocast's dtype.
        """
        hidden = for_products(hidden)
        if torch.compiler.is_compiling():
            if not self.compiles(hidden):
                return self._forward_eagerly(hidden, mask, plan, tokens)
            if plan is None:
                mask, plan = traced_plan(self, self, hidden, mask, training=False)
        if tokens is None:
            tokens = self.read(hidden, mask)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.route(tokens, self.plan(tokens) if plan is None else plan)

    _forward_eagerly = run_eagerly(forward)

    def read(self, hidden: Tensor | Tokens, mask: Tensor | None = None) -> Tokens:
        """Check the input and find the tokens that count (`read_tokens`)."""
        return read_tokens(type(self).__name__, self.config.dim, hidden, mask)

    @run_eagerly
    @torch.no_grad()
    def observe(self, hidden: Tensor | Tokens, mask: Tensor | None = None) -> None:
        """Learn from one training micro-batch without gradients, and move the noise on.

        A batch without a valid token is skipped on a single CPU process only: looking for one would
        stall a GPU, and in a process group every rank must take part, if need be with empty
        statistics.
        """
        tokens = self.read(hidden, mask)
        distributed, on_cpu = is_distributed(), tokens.valid.device.type == "cpu"
        some = tokens.valid.any()
        empty = tokens.valid.numel() == 0 or (on_cpu and not bool(some))
        if empty and not distributed:
            return
        # All ranks must count, also one that has no token this time.
        self.micro_batches += 1 if distributed else some
        self.learn(tokens)

    def learn(self, tokens: Tokens) -> None:
        """Gradient-free learning of this router; most have none."""

    def noise(self, plan: Plan, stage: Stage, num_rows: int) -> Noise | None:
        """Jitter of one stage under a plan."""
        if plan.noise_key is None:
            return None
        return make_noise(plan.noise_key, stage, num_rows, self.config.jitter_std)

    # -- when parameters change -------------------------------------------------------------

    def on_parameters_changed(self) -> None:
        """Parameters were changed by hand: derived caches are out of date."""
        self.parameter_changes += 1

    def on_optimizer_step(self) -> None:
        """After a step of the tracked optimizer."""
        self.on_parameters_changed()

    def on_load(self) -> None:
        """After `load_state_dict`, and after transformers has loaded a checkpoint."""
        self.on_parameters_changed()

    def cached_parameters(self) -> list[nn.Parameter]:
        """Parameters that caches are derived from, so that their optimizer must be tracked."""
        return []

    @property
    def tracked(self) -> bool:
        """True while the hook of a living optimizer reports its steps to this router."""
        return len(self._step_hooks) > 0

    def follow(self, optimizer: Optimizer) -> bool:
        """Have `on_optimizer_step` called after each step; False if it already is."""
        if optimizer in self._step_hooks:
            return False
        hook = optimizer.register_step_post_hook(lambda *_: self.on_optimizer_step())
        self._step_hooks[optimizer] = hook
        return True

    def unfollow(self, optimizer: Optimizer) -> None:
        """Undo `follow`."""
        hook = self._step_hooks.pop(optimizer, None)
        if hook is not None:
            hook.remove()
            self.on_parameters_changed()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step_hooks": None}  # a copy is not known to the optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_hooks = WeakKeyDictionary()
        self._handle = new_handle(self)

    # -- plans ------------------------------------------------------------------------------

    def compiles(self, hidden: Tensor) -> bool:
        """True if a compiler can include the whole router: Triton computes, plans of its own have a
        layout, and it has no forward hooks, which are Python code at every call."""
        kind = type(self)
        packs_plans = kind.plan is Router.plan or kind.plan_layout is not Router.plan_layout
        # `len`, because a compiler does not notice that an empty dict is true later on.
        if len(self._forward_hooks_alias) > 0 or not packs_plans:
            return False
        return use_triton(hidden, *self._parameters.values())

    def plan_layout(self) -> dict[str, str]:
        """The tensors in a plan made now: field -> `dtype:sizes` (T: the tokens)."""
        return {"noise_key": "int64:"} if self.training and self.config.jitter_std > 0 else {}

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in vars(self.config).items())


def _after_load(module: nn.Module, _incompatible: object) -> None:
    assert isinstance(module, Router)
    module.on_load()


class CentroidRouter(Router):
    """A router whose logits are <h, w_e>, with w_e projected onto the unit sphere if asked."""

    def __init__(self, config: CentroidConfig) -> None:
        super().__init__(config)
        self.centroids = nn.Parameter(torch.empty(config.num_experts, config.dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_centroids(self.centroids, self.config.centroid_init)

    def centroids_for(self, hidden: Tensor) -> Tensor:
        """The centroids, on a GPU rounded to the dtype of hidden states of 16 bits."""
        rounded = hidden.is_cuda and hidden.dtype.itemsize == 2
        return self.centroids.to(hidden.dtype) if rounded else self.centroids

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free logits over all experts: [T, D] -> [T, E]."""
        return exact_logits(hidden, self.centroids, self.config.normalize_centroids)


def init_centroids(centroids: Tensor, kind: CentroidInit) -> None:
    """Gaussian directions of unit norm, or Xavier as the paper's listing has it."""
    with torch.no_grad():
        if kind == "xavier":
            nn.init.xavier_uniform_(centroids)
        else:
            nn.init.normal_(centroids)
            centroids /= centroids.norm(dim=-1, keepdim=True)


@own_precision
def exact_logits(hidden: Tensor, centroids: Tensor, normalize: bool) -> Tensor:
    """<h, w_e>, with unit-norm centroids if asked: [T, E] float32 or wider."""
    centroids = full_tensor(centroids)
    rows = unit_rows(centroids) if normalize else centroids
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(dtype) @ rows.to(dtype).T
