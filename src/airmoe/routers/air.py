"""AIR: token -> codeword -> shortlist of M experts -> exact scores -> the best K (Alg. 1 and 3)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count, check_number, config
from airmoe.distributed import full_tensor
from airmoe.flops import RouterCount, RouterLosses, Workload
from airmoe.kernels.backend import use_triton
from airmoe.kernels.cell_gates import cell_gates
from airmoe.kernels.cell_scores import cell_scores
from airmoe.kernels.cells import make_cells
from airmoe.kernels.noise import Stage, combine, make_noise
from airmoe.kernels.norms import inverse_norms, unit_rows
from airmoe.kernels.top_k import LONGEST_ROW, top_k_gates
from airmoe.routers.base import CentroidRouter, Plan
from airmoe.routers.codebook import Codebook, CodebookKind
from airmoe.routers.costs import count_air
from airmoe.routers.expert_choice import capacity_of, expert_choice_gates
from airmoe.routers.lists import (
    Due,
    Key,
    ListCache,
    Lists,
    TensorIdentity,
    build_lists,
    indexed,
)
from airmoe.routers.routing import CellRouting, Lazy, ScoredCells, Tokens
from airmoe.routers.settings import Amount, CentroidConfig, Fairness
from airmoe.routers.tracking import how_to_track

Gate = Literal["token_choice", "expert_choice"]


@dataclass(frozen=True, kw_only=True)
class AirPlan(Lists, Plan):
    """The result of the coarse stage: the lists, and which of them each token has."""

    codeword_ids: Tensor  # [T]
    codewords: Tensor  # [G, D]


class AirRouter(CentroidRouter):
    """Adaptive inverted-index routing, executed in cells."""

    @config
    class Config(CentroidConfig):
        """Settings of AIR.

        `gate`: with "token_choice" a token takes its K best and weighs them by softmax; with
        "expert_choice" experts take tokens.
        """

        num_codewords: int
        shortlist_size: int
        codebook_decay: float = 0.95
        dead_below: float = 1.0
        codebook: CodebookKind = "spherical"
        gate: Gate = "token_choice"
        capacity_factor: float = 1.0  # of the expert-choice gate
        refresh_every: int = 1  # rebuild the shortlists every n optimizer steps

        def check(self) -> None:
            super().check()
            for name in ("num_codewords", "shortlist_size", "refresh_every"):
                check_count(f"{self.label}.{name}", getattr(self, name))
            check_number(f"{self.label}.codebook_decay", self.codebook_decay, below=1.0)
            check_number(f"{self.label}.dead_below", self.dead_below)
            check_number(f"{self.label}.capacity_factor", self.capacity_factor, strict=True)
            check_choice(f"{self.label}.codebook", self.codebook, CodebookKind)
            check_choice(f"{self.label}.gate", self.gate, Gate)
            if self.shortlist_size < self.top_k:
                rule = (
                    f"must be >= top_k = {self.top_k}, because the K active experts come from one "
                    "shortlist"
                )
                raise self.error("shortlist_size", rule, "Raise shortlist_size or lower top_k.")
            if self.shortlist_size > self.num_experts:
                rule = f"must be <= num_experts = {self.num_experts}"
                remedy = "Lower shortlist_size or raise num_experts."
                raise self.error("shortlist_size", rule, remedy)
            if self.gate != "expert_choice" and self.capacity_factor != 1.0:
                rule = 'only has a meaning with gate = "expert_choice"'
                remedy = 'Leave it at 1.0 or set gate="expert_choice".'
                raise self.error("capacity_factor", rule, remedy)

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

        def fairness(self) -> Fairness:
            return Fairness(
                active=Amount(self.top_k, str(self.top_k)),
                structure=Amount(self.num_codewords, f"{self.num_codewords} codewords"),
                candidates=Amount(self.shortlist_size, str(self.shortlist_size)),
            )

        def count_flops(self, workload: Workload, losses: RouterLosses) -> RouterCount:
            return count_air(self, workload, losses)

        def build(self) -> AirRouter:
            return AirRouter(self)

    config: Config
    plan_type = AirPlan

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.codebook = Codebook(
            config.num_codewords,
            config.dim,
            config.codebook,
            config.codebook_decay,
            config.dead_below,
        )
        sizes = config.num_codewords, config.shortlist_size, config.num_experts
        normalize = config.normalize_centroids
        lifetime = config.refresh_every
        self.training_lists = ListCache(*sizes, normalize=normalize, lifetime=lifetime)
        self.evaluation_lists = ListCache(*sizes, normalize=normalize)
        self._untracked_batches = 0
        self._warned_untracked = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for part in (self.codebook, self.training_lists, self.evaluation_lists):
            part.reset_parameters()

    def cached_parameters(self) -> list[nn.Parameter]:
        return [self.centroids]

    def freeze_codebook(self) -> None:
        """Stop the codebook (fine-tuning); shortlists still follow the centroids."""
        self.codebook.frozen = True

    # -- one micro-batch ------------------------------------------------------------------

    def learn(self, tokens: Tokens) -> None:
        """Alg. 3: move the codebook, then rebuild the shortlists if `ListCache.due` says so."""
        self.codebook.update(tokens)
        if not self.training:  # calibration, which leaves the training lists alone
            return
        if not self.tracked:  # every forward builds its own
            self.training_lists.expire()
            self._untracked_batches += 1
            if self._untracked_batches == 2:
                self._warn_untracked()
            return
        key = self._key()
        due = self.training_lists.due(key)
        if due in ("lists", "norms"):  # lists of other tensors are built in the forward, not kept
            lists = self._build_lists(due, tokens.hidden.dtype)
            self.training_lists.store(lists, due, key, self.micro_batches)

    def _warn_untracked(self) -> None:
        if not self._warned_untracked:
            self._warned_untracked = True
            warnings.warn(
                "AirRouter is trained without a tracked optimizer, so its shortlists are rebuilt "
                f"for every micro-batch: correct, but slower. {how_to_track()}",
                stacklevel=2,
            )

    def plan(self, tokens: Tokens) -> AirPlan:
        """The coarse stage: nearest codewords and the shortlists as they are now."""
        codewords, lists = self.codebook.codewords, self._lists(tokens.hidden.dtype)
        own_bytes = 0
        if self.training:  # the next micro-batch moves them, maybe before this plan is used
            codewords = codewords.clone()
            own_bytes = codewords.nbytes
            cached = vars(self.training_lists.view())
            for name, value in vars(lists).items():
                if isinstance(value, Tensor) and value is not cached[name]:
                    own_bytes += value.nbytes
        return AirPlan(
            **vars(lists),
            noise_key=super().plan(tokens).noise_key,
            own_bytes=own_bytes,
            codeword_ids=self.codebook.assign(tokens),
            codewords=codewords,
        )

    def route(self, tokens: Tokens, plan: AirPlan) -> CellRouting:
        """The fine stage: exact scores of every token's shortlist and gates of the best K."""
        config, device = self.config, tokens.hidden.device
        centroids = self.centroids_for(tokens.hidden)
        cells = make_cells(plan.codeword_ids.unsqueeze(-1), plan.experts, plan.reverse)
        noise = self.noise(plan, Stage.TOKEN, tokens.hidden.shape[0])
        operands: dict[str, Any] = {"inverse_norms": plan.inverse_norms, "noise": noise}
        # Tokens choose K experts each, or experts choose `capacity` tokens each.
        capacity, max_per_token = None, config.top_k
        if config.gate == "expert_choice":
            capacity, max_per_token = capacity_of(tokens.valid, config), None

        def cell_probs() -> Tensor:
            """Mean softmax of the cosine to every codeword; the gradient reaches tokens only."""
            states = unit_rows(tokens.hidden)
            cosines = states @ unit_rows(plan.codewords).to(states.dtype).T  # [T, G]
            return tokens.weights.to(states.dtype) @ cosines.softmax(-1)

        too_long = capacity is None and config.shortlist_size > LONGEST_ROW
        if too_long or not use_triton(tokens.hidden, centroids):
            scores = cell_scores(tokens.hidden, centroids, cells, **operands)
            scored = ScoredCells(tokens, cells, scores, config.num_experts)
            if capacity is None:
                gates = top_k_gates(scores, tokens.valid[cells.token_ids], config.top_k)
            else:
                gates = expert_choice_gates(scored, capacity)
            return scored.routing(gates, max_per_token, cell_probs)
        # The same in one kernel, which does not keep the scores.
        found = cell_gates(
            tokens.hidden,
            centroids,
            cells,
            tokens.valid,
            max_per_token,
            capacity=capacity,
            **operands,
        )
        return CellRouting(
            num_tokens=tokens.hidden.shape[0],
            num_experts=config.num_experts,
            valid=tokens.valid,
            cells=cells,
            gates=found.gates,
            max_per_token=max_per_token,
            lazy_expert_probs=Lazy(device, found.expert_probs),
            lazy_log_z=Lazy(device, lambda: found.log_z.index_select(0, cells.order.argsort())),
            lazy_cell_probs=Lazy(device, cell_probs),
        )

    # -- shortlists and their cache -------------------------------------------------------

    def shortlists(self) -> Tensor:
        """[G, M] ascending expert ids: in training the cached lists, or new ones if those are out
        of date; in evaluation jitter-free ones.
        """
        return self._lists().experts

    def rebuild_shortlists(self) -> Tensor:
        """[G, M]: what a rebuild would give now, with the jitter of the cached lists."""
        return self._build_lists("lists", self.training_lists.dtype, self.built_at).experts

    def _lists(self, dtype: torch.dtype = torch.float32) -> Lists:
        """The cached lists, or new ones that are not kept: in training for tokens of this dtype.

        Only `learn` fills the cache of training, from the codebook it has just moved (Alg. 3). A
        forward that nobody observed leaves it alone: earlier ones may want it for their backward.
        """
        if self.training:
            due = self.training_lists.due(self._key()) if self.tracked else "lists"
            if due == "nothing":
                return self.training_lists.view()
            return self._build_lists(due, dtype)
        cache, gradients = self.evaluation_lists, torch.is_grad_enabled()
        # Untracked centroids may have been stepped in evaluation mode too; where they have a
        # gradient, they are trained so.
        unsure = gradients and self.centroids.requires_grad and not self.tracked
        if unsure:
            self.on_parameters_changed()
            if self.centroids.grad is not None:
                self._warn_untracked()
        with cache.lock:
            key = self._key()
            due = cache.due(key)
            if unsure or (gradients and due == "other_tensors"):
                return self._build_lists(due)  # a backward may need the cached ones
            if due != "nothing":
                cache.store(self._build_lists(due), due, key, self.micro_batches)
        return cache.view()

    def _build_lists(
        self, due: Due, dtype: torch.dtype = torch.float32, micro_batch: Tensor | None = None
    ) -> Lists:
        """What is due, with the jitter of this micro-batch or another."""
        config, centroids = self.config, full_tensor(self.centroids.detach())
        if due == "norms":  # scores are exact under any shortlists
            norms = inverse_norms(centroids) if config.normalize_centroids else None
            return indexed(replace(self._cache.view(), inverse_norms=norms), config.num_experts)
        noise = None
        if self.training and config.jitter_std > 0:
            # The codebook's seed is equal on all ranks.
            micro_batch = self.micro_batches if micro_batch is None else micro_batch
            key = combine(self.codebook.seed, micro_batch)
            noise = make_noise(key, Stage.SHORTLIST, config.num_codewords, config.jitter_std)
        size, normalize = config.shortlist_size, config.normalize_centroids
        codewords = self.codebook.codewords
        return build_lists(codewords, centroids, noise, size, normalize=normalize, dtype=dtype)

    def _key(self) -> Key:
        """What lists depend on.

        In training only loading the codebook makes them out of date, not its learning (Alg. 3).
        """
        codewords, version = self.codebook.codewords, self.codebook.version
        tensors = (TensorIdentity(self.centroids),)
        if self.training:
            version = version[:1]
        else:
            tensors += (TensorIdentity(codewords),)
        return Key(self.parameter_changes, use_triton(codewords), version, tensors)

    @property
    def _cache(self) -> ListCache:
        return self.training_lists if self.training else self.evaluation_lists

    @property
    def lists_due(self) -> Due:
        """Which part of this mode's lists is out of date."""
        return self._cache.due(self._key())

    def lists_renewed(self, due: Due) -> None:
        """Note that a CUDA graph has renewed what was due."""
        self._cache.store(None, due, self._key(), self.micro_batches)

    @property
    def built_at(self) -> Tensor | None:
        """The micro-batch in which the training lists were built, None before."""
        return None if self.training_lists.key is None else self.training_lists.built_at

    # -- when parameters change -----------------------------------------------------------

    def on_parameters_changed(self) -> None:
        super().on_parameters_changed()
        self.training_lists.expire()
        self.evaluation_lists.expire()

    def on_optimizer_step(self) -> None:
        # Nothing expires: `ListCache.due` decides, which knows `refresh_every`.
        self.parameter_changes += 1
        if self.config.refresh_every > 1:
            self.training_lists.age += 1

    def on_load(self) -> None:
        self.parameter_changes += 1
        for cache in (self.training_lists, self.evaluation_lists):
            cache.loaded(self.parameter_changes, self.codebook)

    def train(self, mode: bool = True) -> AirRouter:
        if mode != self.training:  # an untracked optimizer may have stepped meanwhile
            self.evaluation_lists.expire()
        super().train(mode)
        return self

    def plan_layout(self) -> dict[str, str]:
        config = self.config
        codewords, size, experts = config.num_codewords, config.shortlist_size, config.num_experts
        layout = {
            "codeword_ids": "int64:T",
            "codewords": f"float32:{codewords},{config.dim}",
            "experts": f"int64:{codewords},{size}",
            "entries": f"int32:{codewords * size}",
            "starts": f"int32:{experts + 1}",
        }
        if config.normalize_centroids:
            layout["inverse_norms"] = f"float32:{experts}"
        return layout | super().plan_layout()
