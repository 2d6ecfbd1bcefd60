"""The inverted index codeword -> M experts, cached at a fixed address."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.distributed import full_tensor
from airmoe.kernels.backend import use_triton
from airmoe.kernels.cells.reverse import ReverseIndex, make_reverse
from airmoe.kernels.inverse_norms import inverse_norms
from airmoe.kernels.noise import Noise
from airmoe.kernels.shortlist import top_m
from airmoe.routers.float32_state import Float32State


class ShortlistCache(Float32State):
    """Shortlists and 1/|w_e| of one moment, rewritten in place so that captured graphs stay true.

    Derived from codewords and centroids, hence never saved.
    """

    experts: Tensor  # [G, M] ascending ids
    inverse_norms: Tensor  # [E]
    entries: Tensor  # [G * M], and
    starts: Tensor  # [E + 1]: the reverse index, for Triton's weight gradients only

    def __init__(self, num_codewords: int, size: int, num_experts: int, normalize: bool) -> None:
        super().__init__()
        self.normalize = normalize
        experts = torch.zeros(num_codewords, size, dtype=torch.int64)
        self.register_buffer("experts", experts, persistent=False)
        norms = torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("inverse_norms", norms, persistent=False)
        for name, shape in (("entries", (experts.numel(),)), ("starts", (num_experts + 1,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int32), persistent=False)
        self.stale = True
        self._reversed = False

    @torch.no_grad()
    def rebuild(self, codewords: Tensor, centroids: Tensor, noise: Noise | None) -> None:
        """Alg. 1, lines 4-7, into the cache."""
        centroids = full_tensor(centroids.detach())
        scale = None
        if self.normalize:
            self.inverse_norms.copy_(inverse_norms(centroids))
            scale = self.inverse_norms
        size = self.experts.shape[1]
        top_m(codewords, centroids, size, inverse_norms=scale, noise=noise, out=self.experts)
        self._reversed = use_triton(codewords, centroids)
        if self._reversed:
            reverse = make_reverse(self.experts, self.inverse_norms.shape[0])
            self.entries.copy_(reverse.entries)
            self.starts.copy_(reverse.starts)
        self.stale = False

    def reverse(self) -> ReverseIndex | None:
        """Expert -> its shortlists, where it was made."""
        return ReverseIndex(self.entries, self.starts) if self._reversed else None

    def scale(self) -> Tensor | None:
        """1/|w_e| where centroids are projected, else None."""
        return self.inverse_norms if self.normalize else None
