"""The codebook: adaptive k-means over token states, learned without gradients (Alg. 2).

State is float32 and is updated in place. In a process group statistics are summed over the ranks,
and replacements drawn from the global batch with shared keys, so all ranks end with the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count, check_number
from airmoe.distributed import all_gather_rows, all_reduce_sum, is_distributed, rank, world_size
from airmoe.kernels.backend import use_backend
from airmoe.kernels.codewords import (
    assign,
    codeword_sums,
    directions,
    drawn_tokens,
    move,
    projected,
)
from airmoe.kernels.noise import Stage, combine, normal
from airmoe.routers.routing import Tokens, read_tokens

CodebookKind = Literal["spherical", "euclidean", "static"]


class Float32State(nn.Module):
    """A module whose floating-point buffers move between devices but never lose precision.

    They stay float32 when a model is cast: bfloat16 cannot hold an average over thousands of
    tokens, nor every whole number above 256.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_widen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self.named_buffers(recurse=False))
        result = super()._apply(fn, recurse)
        for name, after in self.named_buffers(recurse=False):
            if after.is_floating_point() and after.dtype != torch.float32:
                self._buffers[name] = before[name].to(device=after.device, dtype=torch.float32)
        return result


def _widen(module: nn.Module, _incompatible: object) -> None:
    """`load_state_dict(assign=True)` takes any dtype."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.float())


class Codebook(Float32State):
    """Codewords c_g with running counts n_g and sums m_g."""

    def __init__(
        self,
        num_codewords: int,
        dim: int,
        kind: CodebookKind = "spherical",
        decay: float = 0.95,
        dead_below: float = 1.0,
    ) -> None:
        super().__init__()
        check_count("codebook.num_codewords", num_codewords)
        check_count("codebook.dim", dim)
        check_choice("codebook.kind", kind, CodebookKind)
        check_number("codebook.decay", decay, below=1.0)
        check_number("codebook.dead_below", dead_below)
        self.num_codewords, self.dim, self.kind = num_codewords, dim, kind
        self.euclidean = kind == "euclidean"
        self.decay, self.dead_below = decay, dead_below
        self.frozen = False
        # For caches: how often codewords were loaded or reset, and how often they learned.
        self.version = (0, 0)
        self._seen_first_batch = False
        self._warned = False
        rows = torch.empty(num_codewords, dim, dtype=torch.float32)
        self.codewords = nn.Buffer(rows)  # [G, D]
        # [G] running mean of tokens per micro-batch, over all ranks
        self.counts = nn.Buffer(rows.new_empty(num_codewords))
        self.sums = nn.Buffer(torch.empty_like(rows))  # [G, D]
        self.initialized = nn.Buffer(torch.tensor(False))  # whether the first batch was seen
        self.seed = nn.Buffer(torch.empty((), dtype=torch.int64))
        self.updates = nn.Buffer(torch.empty((), dtype=torch.int64))
        self.register_load_state_dict_post_hook(Codebook._forget)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random directions until the first batch, so that a forward always works."""
        self.seed.copy_(torch.randint(2**62, ()))
        # A model may be built on a device without the backend of its training.
        with use_backend("reference"):
            stage, rows = int(Stage.RANDOM_CODEWORDS), self.num_codewords
            keys = combine(self.seed, stage, rows=rows, dtype=torch.int32)
            drawn = normal(keys.unsqueeze(-1), torch.arange(self.dim, device=self.seed.device))
            self.codewords.copy_(directions(drawn))
        self.sums.zero_()
        self.counts.zero_()
        self.initialized.fill_(False)
        self.updates.zero_()
        self._forget()

    def assign(self, hidden: Tensor | Tokens) -> Tensor:
        """Nearest codeword of each token: [T, D] -> [T] (Alg. 1, line 3)."""
        tokens = read_tokens("codebook", self.dim, hidden, None)
        return assign(tokens.hidden, self.codewords, euclidean=self.euclidean)

    @torch.no_grad()
    def update(self, hidden: Tensor | Tokens, mask: Tensor | None = None) -> None:
        """One step of Alg. 2 on a micro-batch; every rank of a process group must call it."""
        tokens = read_tokens("codebook", self.dim, hidden, mask)
        num_tokens = tokens.hidden.shape[0]
        if self.frozen or (num_tokens == 0 and not is_distributed()):
            return
        started = self._seen_first_batch or self._has_started()
        if self.kind == "static" and started:
            return
        per_code = num_tokens * world_size() / self.num_codewords
        if 0 < per_code < 4 * self.dead_below and not (self._warned or self.kind == "static"):
            self._warned = True
            warnings.warn(
                f"codebook: {per_code:.2g} tokens per codeword and micro-batch, but a codeword is "
                f"replaced below {self.dead_below:g}, so healthy ones will be lost. Use larger "
                "micro-batches, fewer codewords or a smaller dead_below.",
                stacklevel=2,
            )
        total = tokens.valid.sum()  # valid tokens of all ranks, numbered rank by rank
        first = torch.zeros_like(total)  # the number of this rank's first one
        if is_distributed():
            # Keys must agree on all ranks, whatever seed each was built with: rank 0's are taken.
            ranks = all_gather_rows(torch.stack([total, self.seed, self.updates]))
            total, first = ranks[:, 0].sum(), ranks[: rank(), 0].sum()
            self.seed.copy_(ranks[0, 1])
            self.updates.copy_(ranks[0, 2])
        updated = total > 0
        if self.kind == "static":
            updated &= ~self.initialized
        if not started:
            self._start(tokens, total, first)
        if self.kind != "static":
            self._step(tokens, total, first)
        self.updates += updated
        self.version = (self.version[0], self.version[1] + 1)

    def _start(self, tokens: Tokens, total: Tensor, first: Tensor) -> None:
        """Codewords from distinct tokens, one drawn from each of G equal strata of the batch."""
        keys = combine(self.seed, int(Stage.FIRST_BATCH), rows=self.num_codewords)
        spherical = not self.euclidean
        drawn = drawn_tokens(
            tokens.hidden, tokens.valid, keys, total, first, strata=True, spherical=spherical
        )
        drawn = all_reduce_sum(drawn)
        starts = (total > 0) & ~self.initialized  # the host may not know
        share = total.float() / self.num_codewords
        ones, old = torch.ones_like(self.counts), self.codewords
        codewords = projected(drawn, ones, old, euclidean=self.euclidean)
        self.codewords.copy_(torch.where(starts, codewords, old))
        self.counts.copy_(torch.where(starts, share, self.counts))
        self.sums.copy_(torch.where(starts, drawn * share, self.sums))
        self.initialized |= starts

    def _step(self, tokens: Tokens, total: Tensor, first: Tensor) -> None:
        """Alg. 2, lines 3-13: assign, EMA of counts and sums, replace the dead, project."""
        codeword_ids = self.assign(tokens)  # where spherical, norms do not matter
        key = combine(self.seed, int(Stage.REPLACE), self.updates)
        keys = combine(key, rows=self.num_codewords)
        spherical = not self.euclidean
        batch_sums = codeword_sums(
            tokens.hidden, tokens.valid, codeword_ids, self.num_codewords, spherical=spherical
        )
        replacements = drawn_tokens(
            tokens.hidden, tokens.valid, keys, total, first, strata=False, spherical=spherical
        )
        totals = all_reduce_sum(torch.cat([batch_sums, replacements], dim=-1))  # [G, 2 D + 1]
        move(
            self.codewords,
            self.counts,
            self.sums,
            totals,
            total,
            decay=self.decay,
            dead_below=self.dead_below,
            euclidean=self.euclidean,
        )

    @property
    def learning(self) -> bool:
        """Whether updates move it: it has started, and is neither frozen nor static."""
        return self._seen_first_batch and not self.frozen and self.kind != "static"

    def _has_started(self) -> bool:
        """Whether the host knows that the first batch was seen.

        The buffer is read until it says True, so that a GPU is stalled in the first steps only,
        and not at all while a CUDA graph is captured: a graph of the first step starts the
        codebook when it is replayed first, and asks the device each time.
        """
        capturing = self.initialized.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._seen_first_batch = bool(self.initialized)
        return self._seen_first_batch

    def _forget(self, _incompatible: object = None) -> None:
        self._seen_first_batch = False
        self.version = (self.version[0] + 1, self.version[1])
