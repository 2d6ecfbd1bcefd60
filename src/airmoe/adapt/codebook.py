"""A codebook that also knows how long its tokens are, for routers whose logits have a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.distributed import all_reduce_sum
from airmoe.routers.codebook import Codebook


class ScaledCodebook(Codebook):
    """Codewords are directions; `scales` [G] is the mean of <h, c_g> over the tokens of each.

    Near codeword g the logit of expert e is <s_g c_g, w_e> + b_e: without a bias any positive
    scale gives the same order of experts, with one (GPT-OSS, DeepSeek-V3) it decides. The mean
    projection is the least-squares choice; the mean norm would be too long, because tokens point
    away from their codeword.
    """

    scales: Tensor  # [G]

    def __init__(self, num_codewords: int, dim: int) -> None:
        # No decay: every update is one whole step of k-means (Lloyd) on the tokens given.
        super().__init__(num_codewords, dim, "spherical", decay=0.0)

    def reset_parameters(self) -> None:
        if "scales" not in self._buffers:
            self.register_buffer("scales", torch.empty_like(self.counts))
        super().reset_parameters()
        with torch.no_grad():
            self.scales.fill_(1.0)

    @property
    def calibrated(self) -> bool:
        """Whether it has learned from tokens; asks the device only until it has."""
        self.check_in_memory()
        return self._has_started()

    def representatives(self) -> Tensor:
        """The token each codeword stands for: [G, D]."""
        return self.scales.unsqueeze(-1) * self.codewords

    @torch.no_grad()
    def measure_scales(self, hidden: Tensor) -> None:
        """Set the scales from the tokens [T, D] of all ranks; without any, the mean."""
        codeword_ids = self.nearest(hidden)  # [T]
        projections = (hidden.float() * self.codewords[codeword_ids]).sum(-1)  # [T]
        pairs = torch.stack([projections, torch.ones_like(projections)], dim=1)  # [T, 2]
        totals = pairs.new_zeros(self.num_codewords, 2)
        totals = all_reduce_sum(totals.index_add_(0, codeword_ids, pairs))  # [G, 2]
        sums, counts = totals.unbind(1)
        mean = sums.sum() / counts.sum()
        self.scales.copy_(torch.where(counts > 0, sums / counts.clamp_min(1), mean))
        self.version = (self.version[0] + 1, self.version[1])

    def empty_state(self, prefix: str) -> dict[str, Any]:
        """The state dict of a codebook that has seen no token, for checkpoints without one."""
        device = self.counts.device
        with torch.device("cpu" if device.type == "meta" else device):
            fresh = new_codebook(self.num_codewords, self.dim)
        return {prefix + name: value for name, value in fresh.state_dict().items()}


def new_codebook(num_codewords: int, dim: int) -> ScaledCodebook:
    """A codebook that has seen nothing; the program's random numbers are not used up."""
    with torch.random.fork_rng(devices=[]):
        return ScaledCodebook(num_codewords, dim)
