"""The hidden states that a trained router sees, on text spread over a split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from airmoe.data.blocks import BlockDataset
from airmoe.model import AirMoeForCausalLM
from airmoe.routers import AirRouter
from airmoe.routers.tokens import read_tokens
from airmoe.training.evaluation import autocast_of
from airmoe.training.load import Trained


def evenly(blocks: BlockDataset, num_tokens: int) -> list[int]:
    """Numbers of whole blocks with that many tokens, from all over the split; all if it has fewer.

    Texts are ordered (by article, by date), so the first ones would not stand for the rest.
    """
    count = min(len(blocks), num_tokens // blocks.block_size)
    return [place * len(blocks) // count for place in range(count)]


@torch.no_grad()
def router_states(
    trained: Trained,
    router: AirRouter,
    blocks: BlockDataset,
    num_tokens: int,
    on_batch: Callable[[int], None],
) -> Tensor:
    """[n, D] float32, one row per token; `on_batch` is told how many tokens were read.

    In the precision and batches of the run. States that are not finite are left out, as in
    training.
    """
    model: AirMoeForCausalLM = trained.model
    options, seen = trained.run.config.training, []

    def watch(_: Any, inputs: tuple[Any, ...]) -> None:
        tokens = read_tokens("recall", router.config.dim, inputs[0], None)
        seen.append(tokens.hidden[tokens.valid].float())

    hook = router.register_forward_pre_hook(watch)
    try:
        for numbers in torch.tensor(evenly(blocks, num_tokens)).split(options.micro_batch_size):
            ids = torch.stack([blocks[number]["input_ids"] for number in numbers.tolist()])
            with autocast_of(options.precision, model.device):
                model.model(input_ids=ids.to(model.device), use_cache=False)
            on_batch(ids.numel())
    finally:
        hook.remove()
    return torch.cat(seen)
