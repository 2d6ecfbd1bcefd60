"""What each rank does; a module of its own, so that the processes can import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import airmoe
from airmoe.adapt.activations import next_token_loss
from tests.adapt.models import build, ids, swap, swapped_routers

BATCHES = [ids(seed) for seed in range(10, 22)]


def calibrate_a_part(rank: int | None, join: Callable[[], None]) -> dict[str, Any]:
    join()
    torch.set_num_threads(1)
    model = swap(build("gpt_oss"))
    # Unequal parts: what is decided by counting tokens must still be decided alike. Cut where
    # every fourth batch is held out, so that the same ones are.
    batches = BATCHES if rank is None else (BATCHES[:4], BATCHES[4:])[rank]
    report = airmoe.calibrate(model, batches, passes=4)
    return {
        "codewords": [router.codebook.codewords for router in swapped_routers(model)],
        "scales": [router.codebook.scales for router in swapped_routers(model)],
        "overlap": [layer.overlap for layer in report.layers],
        "report": str(report),
        "tokens": [report.num_fitted, report.num_measured],
    }


def loss_without_logits(rank: int, join: Callable[[], None]) -> list[float | None]:
    """One rank's batch has no ids to predict; no rank may wait for the other."""
    join()
    model = build("mixtral")
    embedded = {"inputs_embeds": model.get_input_embeddings()(BATCHES[0]).detach()}
    return [next_token_loss(model, [embedded] if rank == 0 else [{"input_ids": BATCHES[0]}])]
