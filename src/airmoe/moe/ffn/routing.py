"""AIR in a model that was trained without it."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.distributed import full_tensor
from airmoe.kernels.norms import inverse_norms
from airmoe.moe.notice import Notice
from airmoe.routers.air import AirPlan, AirRouter
from airmoe.routers.tokens import Tokens

UNCALIBRATED = (
    "A swapped feed-forward network is not calibrated: every expert is scored, which is exact but "
    "slow. Call airmoe.calibrate(model, batches), or train it."
)


class PatientAirRouter(AirRouter):
    """AIR that scores all experts until its codebook has seen tokens, and says so once.

    A model that was trained before it got a router must not be routed by random codewords.
    """

    def __init__(self, config: AirRouter.Config) -> None:
        super().__init__(config)
        self.notice = Notice(UNCALIBRATED)

    def plan(self, tokens: Tokens) -> AirPlan:
        if self.config.shortlist_size == self.config.num_experts or self.codebook._has_started():
            return super().plan(tokens)
        if not self.answered_for:
            self.notice.give()
        return self._plan_of_all(tokens)

    def _plan_of_all(self, tokens: Tokens) -> AirPlan:
        """One cell for all tokens, whose pool are all experts."""
        device = tokens.hidden.device
        everyone = torch.arange(self.config.num_experts, device=device).unsqueeze(0)  # [1, E]
        codeword_ids = torch.zeros(tokens.hidden.shape[0], dtype=torch.int64, device=device)
        scale = None
        if self.config.normalize_centroids:
            scale = inverse_norms(full_tensor(self.centroids.detach()))
        key, codewords = self.current_noise_key(), self.codebook.codewords.clone()
        return AirPlan(key, codeword_ids, everyone, scale, None, codewords)

    def compiles(self, hidden: Tensor) -> bool:
        # A compiled plan has the sizes of the shortlists; a flag of Python's is noticed.
        return self.codebook._seen_first_batch and super().compiles(hidden)
