"""AIR: token -> codeword -> shortlist of M experts -> exact scores -> the best K (Alg. 1 and 3)."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from airmoe.config import config
from airmoe.kernels.backend import use_triton
from airmoe.kernels.cell_gates import cell_gates
from airmoe.kernels.cell_scores import cell_scores
from airmoe.kernels.cells import Cells, make_cells
from airmoe.kernels.layout import ReverseIndex, make_reverse
from airmoe.kernels.noise import Noise, Stage, combine, make_noise
from airmoe.kernels.norms import unit_rows
from airmoe.routers.air_settings import AirSettings
from airmoe.routers.base import Plan
from airmoe.routers.centroids import CentroidRouter
from airmoe.routers.codebook import Codebook
from airmoe.routers.gating import ScoredCells, binary, capacity_of, expert_choice, token_choice
from airmoe.routers.routing import CellRouting, Lazy
from airmoe.routers.seen import OwnLock, Seen
from airmoe.routers.shortlists import ShortlistCache
from airmoe.routers.tokens import Tokens
from airmoe.routers.tracking import how_to_track

PLAN_BYTES = 256 * 2**20  # memory for the plans of forwards that wait for their backward


@dataclass(frozen=True)
class AirPlan(Plan):
    """The coarse stage's outcome."""

    codeword_ids: Tensor  # [T]
    shortlists: Tensor  # [G, M]
    inverse_norms: Tensor | None  # [E]
    reverse: ReverseIndex | None  # of the shortlists
    codewords: Tensor  # [G, D]


class AirRouter(CentroidRouter):
    """Adaptive inverted-index routing, executed in cells."""

    @config
    class Config(AirSettings):
        __doc__ = AirSettings.__doc__

        def build(self) -> AirRouter:
            return AirRouter(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.codebook = Codebook(
            config.num_codewords,
            config.dim,
            config.codebook,
            config.codebook_decay,
            config.dead_below,
        )
        self.training_lists = self._new_cache()
        self.evaluation_lists = self._new_cache()
        self._evaluated_at: tuple[int, int, Seen, Seen] | None = None
        self._evaluating = OwnLock()
        # The micro-batch of the training lists. Derived like them, hence never saved.
        built_at = torch.zeros((), dtype=torch.int64)
        self.register_buffer("_built_at", built_at, persistent=False)
        self._built_at: Tensor
        self._was_built = False
        self._built_from = -1
        self._built_for: Seen | None = None  # the centroids, until an optimizer moves them
        self._fresh = False  # untracked only: the training lists belong to this very micro-batch
        self._untracked_batches = 0
        self._warned_rebuilding = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._built_at.zero_()
        self.codebook.reset_parameters()

    def on_parameters_changed(self) -> None:
        super().on_parameters_changed()
        self._leave_meta_device()
        self.training_lists.expire()
        self._built_for = self._evaluated_at = None

    def _leave_meta_device(self) -> None:
        """Where `load_state_dict(assign=True)` has left all that is not saved."""
        device = self.codebook.codewords.device
        if self._built_at.is_meta and device.type != "meta":
            for cache in (self.training_lists, self.evaluation_lists):
                cache.to_empty(device=device)
            self._built_at = torch.zeros_like(self._built_at, device=device)

    def on_optimizer_step(self) -> None:
        """Training lists may wait for their turn, norms and evaluation may not."""
        super().on_parameters_changed()
        self.training_lists.optimizer_stepped()
        self._built_for = self._evaluated_at = None

    def train(self, mode: bool = True) -> AirRouter:
        if mode != self.training:
            self._evaluated_at = None  # an optimizer nobody told us of may have stepped meanwhile
        super().train(mode)
        return self

    @property
    def kept_plans(self) -> int:
        """Fewer where plans are large: each owns its codewords, and its lists when untracked."""
        owned = self.codebook.codewords.nbytes
        if not self.tracked:
            owned += self.training_lists.experts.nbytes
        return max(4, min(super().kept_plans, PLAN_BYTES // owned))

    @property
    def built_at(self) -> Tensor | None:
        """The micro-batch in which the training lists were built, None before."""
        return self._built_at if self._was_built else None

    def cached_parameters(self) -> list[nn.Parameter]:
        return [self.centroids]

    def freeze_codebook(self) -> None:
        """Stop the codebook (fine-tuning); shortlists still follow the centroids."""
        self.codebook.frozen = True

    def lists_state(self) -> dict[str, Tensor]:
        """Training lists that live several steps: they cannot be derived again in between."""
        lists = self.training_lists.state()
        return {**lists, "built_at": self._built_at} if lists else {}

    @torch.no_grad()
    def restore_lists(self, state: dict[str, Tensor]) -> None:
        """What `lists_state` gave, after parameters and codebook were loaded and the optimizer is
        tracked, which both make the lists due."""
        self.training_lists.restore(state)
        self._built_at.copy_(state["built_at"])
        self._was_built, self._built_from = True, self.codebook.loads

    # -- gradient-free learning -------------------------------------------------------------

    def learn(self, tokens: Tokens) -> None:
        """Alg. 3: move the codebook, then rebuild the shortlists if parameters have changed."""
        self.codebook.update(tokens.hidden, tokens.valid)
        if not self.training:  # calibration: the training lists are not ours to touch
            return
        if self._due() or not self.tracked:
            self._build(self.training_lists, self._shortlist_noise(self.micro_batches))
            self._built_at.copy_(self.micro_batches)
            self._was_built = True
            self._built_from = self.codebook.loads
            self._fresh = True
            self._note_untracked()
        elif self.training_lists.due == "norms":
            self.training_lists.renew_norms(self.centroids)
        elif self._built_for is not None:
            return
        self._built_for = Seen(self.centroids)

    def _note_untracked(self) -> None:
        if self.tracked:
            return
        self._untracked_batches += 1
        if self._untracked_batches == 2:
            self._warn_of_rebuilding()

    def _warn_of_rebuilding(self) -> None:
        if self._warned_rebuilding:
            return
        self._warned_rebuilding = True
        warnings.warn(
            "AirRouter is trained without a tracked optimizer, so its shortlists are rebuilt for "
            f"every micro-batch: correct, but slower. {how_to_track()}",
            stacklevel=2,
        )

    def _shortlist_noise(self, micro_batch: Tensor) -> Noise | None:
        """Shortlist jitter (Alg. 1, line 6): the codebook's seed, hence equal on all ranks."""
        if not self.training or self.config.jitter_std == 0:
            return None
        key = combine(self.codebook.seed, micro_batch)
        return make_noise(key, Stage.SHORTLIST, self.config.num_codewords, self.config.jitter_std)

    # -- coarse stage -----------------------------------------------------------------------

    def shortlists(self) -> Tensor:
        """[G, M] ascending expert ids: the cached training lists, or jitter-free ones in eval."""
        return self._lists().experts

    def rebuild_shortlists(self) -> Tensor:
        """[G, M] what a rebuild at this moment would give under the cached lists' jitter."""
        lists = self._new_cache()
        built_at = self.micro_batches if self.built_at is None else self.built_at
        noise = self._shortlist_noise(built_at)
        self._build(lists, noise)
        return lists.experts

    def _build(self, lists: ShortlistCache, noise: Noise | None) -> None:
        lists.rebuild(self.codebook.codewords, self.centroids, noise)

    def _new_cache(self) -> ShortlistCache:
        config = self.config
        with torch.device(self.codebook.codewords.device):
            return ShortlistCache(
                config.num_codewords,
                config.shortlist_size,
                config.num_experts,
                config.normalize_centroids,
                config.refresh_every,
            )

    def _lists(self) -> ShortlistCache:
        if self.training:
            if self._due() or self._edited() or not (self.tracked or self._fresh):
                # Nobody observed this forward, or other centroids have come between two steps:
                # right for now, but not kept, because the next observe builds from the codebook
                # as it will be then (Alg. 3's order), and backwards may want those that are there.
                return self._fresh_lists()
            if self.training_lists.due == "norms":  # nobody observed this forward
                lists = copy.deepcopy(self.training_lists)
                lists.renew_norms(self.centroids)
                return lists
            return self.training_lists
        if torch.is_grad_enabled() and self.centroids.requires_grad and not self.tracked:
            # Somebody may be training a model in evaluation mode; is, where a backward was.
            self._evaluated_at = None
            if self.centroids.grad is not None:
                self._warn_of_rebuilding()
            return self._fresh_lists()
        with self._evaluating:  # one of several threads builds, the others find what it built
            moment = self._moment()
            if self._evaluated_at != moment:
                before = self._evaluated_at
                if before is not None and before[:2] == moment[:2] and torch.is_grad_enabled():
                    return self._fresh_lists()  # a backward may want those of the other centroids
                self._build(self.evaluation_lists, None)
                self._evaluated_at = moment
        return self.evaluation_lists

    def _fresh_lists(self) -> ShortlistCache:
        """Lists of this moment that nobody keeps."""
        lists = self._new_cache()
        noise = self._shortlist_noise(self.micro_batches)
        self._build(lists, noise)
        return lists

    def _moment(self) -> tuple[int, int, Seen, Seen]:
        """Changes when the evaluation lists must be rebuilt.

        The hook counts; what was seen only adds edits made by hand, and other tensors.
        """
        codewords, centroids = Seen(self.codebook.codewords), Seen(self.centroids)
        return self.parameter_changes, self.codebook.changes, codewords, centroids

    def _due(self) -> bool:
        """True when the training lists must be rebuilt: a step, or another codebook, came since."""
        return self.training_lists.stale or self._built_from != self.codebook.loads

    def _edited(self) -> bool:
        """True when other centroids than those of the training lists came between two steps."""
        return self._built_for is not None and self._built_for != Seen(self.centroids)

    def plan(self, tokens: Tokens) -> AirPlan:
        if not tokens.hidden.is_meta:
            self.codebook.check_in_memory()
        lists = self._lists()
        shortlists, scale, reverse = lists.experts, lists.scale(), lists.reverse()
        if self.training and not self.tracked:
            # The next micro-batch overwrites the cache, maybe before this one's backward.
            shortlists = shortlists.clone()
            scale = None if scale is None else scale.clone()
            if reverse is not None:
                reverse = ReverseIndex(reverse.entries.clone(), reverse.starts.clone())
            self._fresh = False
        codeword_ids = self.codebook.nearest(tokens.hidden)
        codewords = self.codebook.codewords
        if self.training:  # the next micro-batch moves them, maybe before somebody reads this one
            codewords = codewords.clone()
        key = self.current_noise_key()
        return AirPlan(key, codeword_ids, shortlists, scale, reverse, codewords)

    def plan_layout(self) -> str:
        config = self.config
        fields = [
            "int64:T",
            f"int64:{config.num_codewords},{config.shortlist_size}",
            f"int32:{config.num_codewords * config.shortlist_size}",
            f"int32:{config.num_experts + 1}",
            f"float32:{config.num_codewords},{config.dim}",
            *([f"float32:{config.num_experts}"] if config.normalize_centroids else []),
        ]
        return ";".join([*fields, super().plan_layout()])

    def pack_plan(self, plan: AirPlan) -> list[Tensor]:
        reverse = plan.reverse or make_reverse(plan.shortlists, self.config.num_experts)
        index = [plan.codeword_ids, plan.shortlists, reverse.entries, reverse.starts]
        norms = [] if plan.inverse_norms is None else [plan.inverse_norms]
        return [*index, plan.codewords, *norms, *super().pack_plan(plan)]

    def unpack_plan(self, tensors: list[Tensor]) -> AirPlan:
        codeword_ids, shortlists, entries, starts, codewords = tensors[:5]
        rest = iter(tensors[5:])  # compilers differ in what they let one do with a part of a list
        scale = next(rest) if self.config.normalize_centroids else None
        key = next(rest, None)
        reverse = ReverseIndex(entries, starts)
        return AirPlan(key, codeword_ids, shortlists, scale, reverse, codewords)

    # -- fine stage -------------------------------------------------------------------------

    def route(self, tokens: Tokens, plan: AirPlan) -> CellRouting:
        config = self.config
        cells = make_cells(plan.codeword_ids.unsqueeze(-1), plan.shortlists, plan.reverse)
        noise = self.noise(plan, Stage.TOKEN, tokens.hidden.shape[0])
        capacity = self._capacity(tokens)
        if use_triton(tokens.hidden, self.centroids):
            return self._route_in_one(tokens, plan, cells, noise, capacity)
        scores = cell_scores(
            tokens.hidden, self.centroids, cells, inverse_norms=plan.inverse_norms, noise=noise
        )
        scored = ScoredCells(tokens, cells, scores, config.num_experts)
        if capacity is None:
            gates, most = self._weighed(token_choice(scored, config.top_k)), config.top_k
        else:
            gates, most = expert_choice(scored, capacity), None
        return scored.routing(gates, most, lambda: codeword_probs(tokens, plan.codewords))

    def _capacity(self, tokens: Tokens) -> Tensor | None:
        """Tokens an expert takes, where experts choose."""
        config = self.config
        if config.gate != "expert_choice":
            return None
        return capacity_of(tokens.valid, config.top_k, config.num_experts, config.capacity_factor)

    def _weighed(self, gates: Tensor) -> Tensor:
        """[N, M] gates of token choice as `gate` wants them."""
        return binary(gates) if self.config.gate == "binary" else gates

    def _route_in_one(
        self,
        tokens: Tokens,
        plan: AirPlan,
        cells: Cells,
        noise: Noise | None,
        capacity: Tensor | None,
    ) -> CellRouting:
        """The same without keeping the scores."""
        config, device = self.config, tokens.hidden.device
        most = config.top_k if capacity is None else None
        found = cell_gates(
            tokens.hidden,
            self.centroids,
            cells,
            tokens.valid,
            most,
            capacity=capacity,
            inverse_norms=plan.inverse_norms,
            noise=noise,
        )
        return CellRouting(
            num_tokens=tokens.hidden.shape[0],
            num_experts=config.num_experts,
            valid=tokens.valid,
            cells=cells,
            gates=self._weighed(found.gates),
            max_per_token=most,
            lazy_expert_probs=Lazy(device, found.expert_probs),
            lazy_log_z=Lazy(device, lambda: found.log_z.index_select(0, cells.order.argsort())),
            lazy_cell_probs=Lazy(device, lambda: codeword_probs(tokens, plan.codewords)),
        )


def codeword_probs(tokens: Tokens, codewords: Tensor) -> Tensor:
    """[G] mean softmax of the cosine to every codeword; the gradient reaches tokens only."""
    states = unit_rows(tokens.hidden)
    shares = (states @ unit_rows(codewords).to(states.dtype).T).softmax(-1)  # [T, G]
    return tokens.weights.to(shares.dtype) @ shares
