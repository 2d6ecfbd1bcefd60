"""The inverted index codeword -> M experts, cached at a fixed address."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from airmoe.distributed import full_tensor
from airmoe.kernels.backend import use_triton
from airmoe.kernels.layout import ReverseIndex, make_reverse
from airmoe.kernels.noise import Noise
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.shortlist import top_m
from airmoe.routers.float32_state import Float32State

Due = Literal["nothing", "norms", "lists"]  # lists: both


class ShortlistCache(Float32State):
    """Shortlists and 1/|w_e| of one moment, rewritten in place so that captured graphs stay true.

    Derived from codewords and centroids, hence never saved. `due` says what has to be derived
    again; lists live `lifetime` optimizer steps, norms one.
    """

    experts: Tensor  # [G, M] ascending ids
    inverse_norms: Tensor  # [E]
    entries: Tensor  # [G * M], and
    starts: Tensor  # [E + 1]: the reverse index, for Triton's weight gradients only

    def __init__(
        self,
        num_codewords: int,
        size: int,
        num_experts: int,
        normalize: bool,
        lifetime: int = 1,
    ) -> None:
        super().__init__()
        self.normalize, self.lifetime = normalize, lifetime
        experts = torch.zeros(num_codewords, size, dtype=torch.int64)
        self.register_buffer("experts", experts, persistent=False)
        norms = torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("inverse_norms", norms, persistent=False)
        for name, shape in (("entries", (experts.numel(),)), ("starts", (num_experts + 1,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int32), persistent=False)
        self.due: Due = "lists"
        self._age = 0  # optimizer steps since the lists were built
        self._reversed = False

    @property
    def stale(self) -> bool:
        """Whether the lists must be built again."""
        return self.due == "lists"

    def expire(self) -> None:
        """Everything must be derived again: parameters were loaded, or changed by hand."""
        self.due = "lists"

    def optimizer_stepped(self) -> None:
        self._age += 1
        self.due = "lists" if self.stale or self._age >= self.lifetime else "norms"

    def settle(self, due: Due = "nothing") -> None:
        """What was due has been done, here or by a captured graph, all but this."""
        if self.stale and due != "lists":
            self._age = 0
        self.due = due

    @torch.no_grad()
    def rebuild(self, codewords: Tensor, centroids: Tensor, noise: Noise | None) -> None:
        """Alg. 1, lines 4-7, into the cache."""
        centroids = full_tensor(centroids.detach())
        self._renorm(centroids)
        scale = self.scale()
        size = self.experts.shape[1]
        top_m(codewords, centroids, size, inverse_norms=scale, noise=noise, out=self.experts)
        self._make_reverse()
        self.settle()

    def _make_reverse(self) -> None:
        self._reversed = use_triton(self.experts, self.inverse_norms)
        if self._reversed:
            reverse = make_reverse(self.experts, self.inverse_norms.shape[0])
            self.entries.copy_(reverse.entries)
            self.starts.copy_(reverse.starts)

    @torch.no_grad()
    def renew_norms(self, centroids: Tensor) -> None:
        """Scores are exact whatever the age of the lists; costs no product with codewords."""
        self._renorm(full_tensor(centroids.detach()))
        self.settle()

    def _renorm(self, centroids: Tensor) -> None:
        if self.normalize:
            self.inverse_norms.copy_(inverse_norms(centroids))

    def state(self) -> dict[str, Tensor]:
        """Lists that live on, for a run that is stopped now; nothing when they are due anyway."""
        if self.stale:
            return {}
        return {"experts": self.experts.to(torch.int32), "age": torch.tensor(self._age)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """The lists of `state` as they were after the optimizer's last step."""
        self.experts.copy_(state["experts"])
        self._make_reverse()
        self._age, self.due = int(state["age"]), "norms"

    def reverse(self) -> ReverseIndex | None:
        """Expert -> its shortlists, where it was made."""
        return ReverseIndex(self.entries, self.starts) if self._reversed else None

    def scale(self) -> Tensor | None:
        """1/|w_e| where centroids are projected, else None."""
        return self.inverse_norms if self.normalize else None
