"""Finding the plan of a forward that activation checkpointing runs again.

Between a forward and its recomputation the codebook and the noise may have moved on (several
micro-batches can wait for one backward), so the plan of each forward is kept and found again.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from airmoe.routers.base import Plan

KEPT_PLANS = 64  # forwards that may wait for their backward
PLAN_BYTES = 256 * 2**20  # fewer, down to LEAST_PLANS, if their plans own more memory than this
LEAST_PLANS = 4
SAMPLED_ROWS = 4


@dataclass(frozen=True)
class _Kept:
    ticket: int
    num_tokens: int
    sample: Tensor  # a few rows of the input
    plan: Plan


class PlanLog:
    """The plans of recent training forwards, newest last."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=KEPT_PLANS)
        self._parameter_changes = -1
        self._warned = False

    def clear(self) -> None:
        self._kept.clear()

    def __getstate__(self) -> dict[str, object]:
        return {}  # copies of a layer start without plans

    def __setstate__(self, _state: dict[str, object]) -> None:
        self.__init__()

    def keep(self, ticket: int, hidden: Tensor, plan: Plan, changes: int) -> None:
        """Remember a forward; a change of parameters ends all before it."""
        if changes != self._parameter_changes:
            self._kept.clear()
            self._parameter_changes = changes
        kept = self._kept
        kept.append(_Kept(ticket, hidden.shape[0], _sample(hidden), plan))
        while len(kept) > LEAST_PLANS and sum(one.plan.own_bytes for one in kept) > PLAN_BYTES:
            kept.popleft()

    def find(self, ticket: int, hidden: Tensor) -> Plan | None:
        """The plan of the forward being recomputed: by ticket, and by content where that fails.

        Contents are compared (which waits for the device) only when the random state was not
        restored, or when several forwards started from the same one. None if there is no plan for
        this number of tokens.
        """
        fitting = [kept for kept in self._kept if kept.num_tokens == hidden.shape[0]]
        same_ticket = [kept for kept in fitting if kept.ticket == ticket]
        if len(same_ticket) == 1:
            return same_ticket[0].plan
        sample = _sample(hidden)
        for kept in reversed(same_ticket or fitting):
            if torch.equal(kept.sample, sample):
                return kept.plan
        if not self._warned:
            self._warned = True
            warnings.warn(
                "MoELayer is recomputed, but the plan of its first forward is gone, so gradients "
                "are those of a slightly different routing. Either its inputs have changed, or too "
                "many forwards wait for their backward, or it was in evaluation mode in between. "
                "Keep the model in training mode until backward, and preserve_rng_state on.",
                stacklevel=4,
            )
        return fitting[-1].plan if fitting else None


def inside_backward() -> bool:
    """True while autograd executes a backward: a training forward in there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def unseen_by_checkpointing() -> Iterator[None]:
    """For code that runs in the first forward but not in its recomputation: learning, planning.

    Selective activation checkpointing gives the n-th saved result of an operator to its n-th call
    in the second run, so it must not see calls that the second run does not make.
    """
    selective = False
    for mode in _get_current_dispatch_mode_stack():
        selective |= type(mode).__module__ == torch.utils.checkpoint.__name__
    with _disable_current_modes() if selective else nullcontext():
        yield


def _sample(hidden: Tensor) -> Tensor:
    """A few evenly spaced rows: [T, D] -> [at most SAMPLED_ROWS, D]."""
    step = max(1, hidden.shape[0] // SAMPLED_ROWS)
    return hidden.detach()[::step][:SAMPLED_ROWS].clone()
