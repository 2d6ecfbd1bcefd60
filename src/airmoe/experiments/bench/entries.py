"""Who can be measured, by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from airmoe.experiments.bench import work
from airmoe.experiments.bench.contenders import (
    Air,
    Coarse,
    Contender,
    Exact,
    Hierarchical,
    Listing,
    NotHereError,
    Peer,
    gathered_exact,
    gathered_peer,
)
from airmoe.experiments.bench.inputs import Inputs
from airmoe.kernels.backend import Choice, backend_for, use_backend

Role = Literal["air", "baseline", "coarse"]  # a coarse layer is no granular baseline


@dataclass(frozen=True)
class Entry:
    """One line of a table."""

    key: str
    name: str
    role: Role
    build: Callable[[Inputs], Contender]
    work: work.WorkOf
    backend: Choice | None = "auto"  # None: plain PyTorch, nothing of ours
    splits: bool = False  # whether a batch that does not fit is run in parts


ENTRIES = {
    entry.key: entry
    for entry in (
        Entry("air-triton", "AIR Triton", "air", Air, work.air_work, backend="triton"),
        Entry("air-reference", "AIR reference", "air", Air, work.air_work, backend="reference"),
        Entry("coarse", "coarse", "coarse", Coarse, work.coarse_work),
        Entry("hierarchical", "hierarchical", "baseline", Hierarchical, work.hierarchical_work),
        Entry("exact", "exact", "baseline", Exact, work.exact_work),
        Entry("peer", "PEER", "baseline", Peer, work.peer_work),
        Entry(
            "exact-gathered",
            "exact, gathered",
            "baseline",
            gathered_exact,
            work.dense_exact_work,
            backend=None,
            splits=True,
        ),
        Entry(
            "peer-gathered",
            "PEER, gathered",
            "baseline",
            gathered_peer,
            work.peer_work,
            backend=None,
            splits=True,
        ),
        Entry(
            "listing",
            "paper's listing",
            "baseline",
            Listing,
            work.listing_work,
            backend=None,
            splits=True,
        ),
    )
}


@contextmanager
def backend(entry: Entry, inputs: Inputs) -> Iterator[str]:
    """Compute with the backend of an entry; gives the name of what is used."""
    if entry.backend == "triton" and inputs.device.type != "cuda":
        raise NotHereError("Triton's interpreter on a CPU has no speed to measure")
    if entry.backend is None:
        yield "plain PyTorch"
        return
    with use_backend(entry.backend):
        used = backend_for(inputs.device, inputs.shape.torch_dtype)
        if entry.backend not in ("auto", used):
            raise NotHereError(f"backend {entry.backend} is not available, {used} is")
        yield used


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
