"""What the swapped routers of all families share: token -> codeword -> shortlist -> logits.

A swapped router is the stock module itself with its class changed to a subclass of its own: its
weights and hooks stay, and so does every reference to it. The family's class adds how it selects.
"""

from __future__ import annotations

import types
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from airmoe.distributed import all_reduce_sum, full_tensor
from airmoe.errors import ConfigError
from airmoe.kernels.cell_scores import cell_scores
from airmoe.kernels.cells import make_cells
from airmoe.routers.base import exact_logits, run_eagerly
from airmoe.routers.codebook import Codebook
from airmoe.routers.lists import TensorIdentity
from airmoe.routers.routing import read_tokens

# Attributes that a swapped router has in addition to the stock module's.
ADDED = ("codebook", "shortlist_size", "_warned", "_cached")
UNCALIBRATED = (
    "The swapped routers have no codebook yet, so they score every expert, as before the swap. "
    "Call airmoe.calibrate(model, batches) with some of your text."
)
# In every family's class the stock class comes after this one.
_Base = nn.Module if TYPE_CHECKING else object


class ScaledCodebook(Codebook):
    """Codewords are directions; `scales` [G] is the mean of <h, c_g> over the tokens of each.

    Near codeword g the logit of expert e is <s_g c_g, w_e> + b_e: without a bias any positive
    scale gives the same order of experts, with one (GPT-OSS, DeepSeek-V3) it decides. The mean
    projection is the least-squares choice; the mean norm would be too long, because tokens point
    away from their codeword.
    """

    def __init__(self, num_codewords: int, dim: int) -> None:
        # No decay: every update is one whole step of k-means (Lloyd) on the tokens given.
        super().__init__(num_codewords, dim, "spherical", decay=0.0)
        self.scales = nn.Buffer(torch.ones_like(self.counts))  # [G]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "scales" in self._buffers:  # not yet when the base class is built
            self.scales.fill_(1.0)

    @property
    def calibrated(self) -> bool:
        """Whether it has learned from tokens; asks the device only until it has."""
        if self.initialized.is_meta:
            raise ConfigError(
                "router.codebook",
                "on the meta device",
                "must be in memory: offloading brings back the buffers of a module for its "
                "forward, and a codebook has none",
                "Load the model without offload_buffers=True.",
            )
        return self._has_started()

    def representatives(self) -> Tensor:
        """The token that each codeword represents: [G, D]."""
        return self.scales.unsqueeze(-1) * self.codewords

    @torch.no_grad()
    def measure_scales(self, hidden: Tensor) -> None:
        """Set the scales from the tokens [T, D] of all ranks; without any, the mean."""
        codeword_ids = self.assign(hidden)  # [T]
        projections = (hidden.float() * self.codewords[codeword_ids]).sum(-1)  # [T]
        pairs = torch.stack([projections, torch.ones_like(projections)], dim=1)  # [T, 2]
        totals = pairs.new_zeros(self.num_codewords, 2)
        totals = all_reduce_sum(totals.index_add_(0, codeword_ids, pairs))  # [G, 2]
        sums, counts = totals.unbind(1)
        mean = sums.sum() / counts.sum()
        self.scales.copy_(torch.where(counts > 0, sums / counts.clamp_min(1), mean))
        self.version = (self.version[0] + 1, self.version[1])


def new_codebook(num_codewords: int, dim: int) -> ScaledCodebook:
    """A codebook that has seen nothing; the program's random numbers are not used up."""
    with torch.random.fork_rng(devices=[]):
        return ScaledCodebook(num_codewords, dim)


class Selection:
    """How a router ranks and selects experts: the K largest logits, then softmax among them.

    Families override what they do otherwise.
    """

    top_k: int
    full_logits: Any  # [T, D] -> [T, E]
    # Whether an expert of the exact selection that is a candidate is always selected.
    keeps_candidates: ClassVar[bool] = True

    def select(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, K] from float32 logits [T, E], -inf outside the shortlist.

        `dtype` is that of the hidden states, which some families give their weights.
        """
        best, expert_ids = logits.topk(self.top_k, dim=-1)
        return best.softmax(-1).to(dtype), expert_ids

    def masses(self, logits: Tensor) -> Tensor:
        """The distribution over all experts from which the family takes its weights: [T, E]."""
        return logits.softmax(-1)

    def order(self, logits: Tensor) -> Tensor:
        """What experts are ranked by for a shortlist, larger first: [G, E] -> [G, E]."""
        return logits

    @torch.no_grad()
    def ranking(self, representatives: Tensor) -> Tensor:
        """Experts for each codeword's representative, best first: [G, D] -> [G, E]."""
        logits = self.full_logits(representatives)
        return self.order(logits).argsort(dim=-1, descending=True, stable=True)

    @staticmethod
    def least_shortlist(router: Any) -> int:
        """The smallest shortlist that always holds enough candidates, also for a stock router."""
        return router.top_k


class ShortlistRouter(Selection, _Base):
    """A stock router that scores only the shortlist of a token's codeword.

    Training changes neither codebook nor counters, so that a recomputed forward (activation
    checkpointing) gives the same answer. Only `calibrate` moves the codebook; the shortlists
    follow the weights, and are built at every forward that may belong to training.
    """

    weight: nn.Parameter  # [E, D]
    num_experts: int
    hidden_dim: int
    codebook: ScaledCodebook
    shortlist_size: int
    _warned: list[str]  # warnings already given; one list for all routers of a model
    _cached: tuple[tuple[Any, ...], Tensor] | None  # the key, and the shortlists built for it

    # -- swap and restore -------------------------------------------------------------------

    def take_over(self, codebook: ScaledCodebook, shortlist_size: int, warned: list[str]) -> None:
        """Set the attributes that the stock module, whose class was just changed, lacks."""
        self.codebook = codebook.train(self.training)
        self.shortlist_size, self._warned = shortlist_size, warned
        self._cached = None
        _rebind_forward(self)

    def give_back(self) -> None:
        """Become the stock module again."""
        for name in ADDED:
            delattr(self, name)
        self.__class__ = type(self).__bases__[-1]  # pyright: ignore[reportAttributeAccessIssue]
        _rebind_forward(self)

    def train(self, mode: bool = True) -> Any:
        # Even if the mode is unchanged: code that changes weights without moving their version
        # counter (a fused optimizer, `.data` of averaged weights) calls `model.eval()` to tell us.
        self._cached = None
        return super().train(mode)

    # -- coarse stage -----------------------------------------------------------------------

    @property
    def expert_bias(self) -> Tensor | None:
        """[E], added to the logits."""
        return None

    def ranked_by(self) -> list[Tensor]:
        """The tensors on which the order of experts depends, besides the codebook."""
        return [tensor for tensor in (self.weight, self.expert_bias) if tensor is not None]

    @torch.no_grad()
    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact logits over all experts: [T, D] -> [T, E] float32 or wider."""
        logits, bias = exact_logits(hidden, self.weight, normalize=False), self.expert_bias
        return logits if bias is None else logits + full_tensor(bias).to(logits.dtype)

    def shortlists(self) -> Tensor:
        """[G, M] ascending expert ids."""
        learned = any(tensor.requires_grad for tensor in self.ranked_by())
        if learned and (self.training or torch.is_grad_enabled()):
            self._cached = None
            return self._build()
        codebook = self.codebook
        sources = (codebook.codewords, codebook.scales, *self.ranked_by())
        device, identities = codebook.codewords.device, map(TensorIdentity, sources)
        key = (self.shortlist_size, codebook.version, device, *identities)
        cached = self._cached  # read once: another thread may forget it
        if cached is None or cached[0] != key:
            cached = self._cached = key, self._build()
        return cached[1]

    def _build(self) -> Tensor:
        # Lists built in inference mode may later be needed in training.
        with torch.inference_mode(False):
            best = self.ranking(self.codebook.representatives())[:, : self.shortlist_size]
            return best.sort(-1).values

    # -- fine stage -------------------------------------------------------------------------

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E] (-inf outside the shortlist), weights [T, K], ids [T, K].

        Where every expert is scored, the stock module's own code does it.
        """
        logits = None
        if self.shortlist_size < self.num_experts:
            logits = self._routed_logits(hidden_states)
        if logits is None:
            return super().forward(hidden_states)
        weights, expert_ids = self.select(logits, hidden_states.dtype)
        return logits, weights, expert_ids

    @run_eagerly
    def _routed_logits(self, hidden_states: Tensor) -> Tensor | None:
        if not self.codebook.calibrated:
            if not self._warned:
                self._warned.append(UNCALIBRATED)
                warnings.warn(UNCALIBRATED, stacklevel=3)
            return None
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        return self.shortlist_logits(hidden, self.shortlists())

    def shortlist_logits(self, hidden: Tensor, shortlists: Tensor) -> Tensor:
        """Score hidden [T, D] against their codeword's shortlist: [T, E] float32 or wider."""
        # A token of NaN has no nearest codeword; its logits are NaN all the same.
        finite = read_tokens("router", self.hidden_dim, hidden.detach(), None)
        codeword_ids = self.codebook.assign(finite)  # [T]
        cells = make_cells(codeword_ids.unsqueeze(-1), shortlists)
        scores = cell_scores(hidden, full_tensor(self.weight), cells)  # [T, M], sorted by cell
        scores = scores.index_select(0, cells.order.argsort())
        candidates = shortlists[codeword_ids]  # [T, M]
        bias = self.expert_bias
        if bias is not None:
            scores = scores + bias.to(scores.dtype)[candidates]
        empty = scores.new_full((hidden.shape[0], self.num_experts), -torch.inf)
        return empty.scatter(1, candidates, scores)

    # -- loading and printing ---------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A stock checkpoint has no codebook: one learned for other weights must not stay."""
        inside = prefix + "codebook."
        if prefix + "weight" in state_dict and not any(k.startswith(inside) for k in state_dict):
            codebook = self.codebook
            with torch.device("cpu" if codebook.counts.is_meta else codebook.counts.device):
                empty = new_codebook(codebook.num_codewords, codebook.dim).state_dict()
            state_dict.update({inside + name: value for name, value in empty.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._cached = None

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts} experts, top {self.top_k}, shortlists of {self.shortlist_size} "
            f"for {self.codebook.num_codewords} codewords"
        )


def _rebind_forward(module: nn.Module) -> None:
    """Accelerate keeps the forward it wraps on the instance: make it that of the present class."""
    if "_old_forward" in vars(module):
        module._old_forward = types.MethodType(type(module).forward, module)  # pyright: ignore
