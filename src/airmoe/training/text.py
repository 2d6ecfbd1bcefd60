"""From a run's data options to prepared tokens, and from those to each step's micro-batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from airmoe.data import (
    BlockDataset,
    PrepareConfig,
    Prepared,
    PrepareProgress,
    open_prepared,
    prepare,
)
from airmoe.data.tokenizer_choice import is_trained, make_tokenizer
from airmoe.distributed import rank, world_size
from airmoe.errors import ConfigError
from airmoe.training.config import DataOptions, RunConfig, TrainingOptions


def data_folder(data: DataOptions) -> Path:
    """The folder of the tokens that these options ask for."""
    if data.folder is not None:
        return Path(data.folder)
    names = (Path(name).name if "/" in name else name for name in (data.corpus, data.tokenizer))
    return Path("data") / re.sub(r"[^\w.-]+", "-", "-".join(names))


def prepared_data(
    data: DataOptions, report: Callable[[PrepareProgress], None] | None = None
) -> Prepared:
    """The tokens of a run, every shard verified; prepared now if they do not exist yet.

    A folder given by name is taken as it is; only its tokenizer must be the one asked for.
    """
    folder = data_folder(data)
    if data.folder is None or not folder.exists():
        config = PrepareConfig(
            corpus=data.corpus,
            tokenizer=data.tokenizer,
            out=str(folder),
            validation=data.validation,
            validation_fraction=data.validation_fraction,
            max_tokens=data.max_tokens,
        )
        prepare(config, report)
        return open_prepared(folder)
    prepared = open_prepared(folder)
    found = prepared.manifest.recipe.tokenizer
    if found != data.tokenizer and (
        is_trained(data.tokenizer)
        or make_tokenizer(data.tokenizer).identity != prepared.manifest.tokenizer
    ):
        rule = f"must be {found}, with which {folder} was prepared"
        remedy = f"Set data.tokenizer={found}, or prepare the text again."
        raise ConfigError("data.tokenizer", data.tokenizer, rule, remedy)
    return prepared


def blocks_of(config: RunConfig, prepared: Prepared) -> tuple[BlockDataset, Any]:
    """The blocks to train on and to validate on; refused if there are too few for one step."""
    options, block_size = config.training, config.data.block_size
    train_blocks = prepared.blocks("train", block_size)
    if len(train_blocks) < options.batch_size:
        found = f"{len(train_blocks)}, the blocks of {block_size} tokens in the training text"
        remedy = "Use more text, shorter blocks (data.block_size) or a smaller batch."
        raise ConfigError("training.batch_size", options.batch_size, f"must be <= {found}", remedy)
    eval_blocks: Any = prepared.blocks("validation", block_size)
    if options.eval_blocks is not None and options.eval_blocks < len(eval_blocks):
        eval_blocks = Subset(eval_blocks, range(options.eval_blocks))
    return train_blocks, eval_blocks


@lru_cache(maxsize=1)
def epoch_order(num_blocks: int, batch_size: int, seed: int, epoch: int) -> list[int]:
    """The blocks of one epoch in their order: shuffled anew, cut to whole optimizer steps."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    used = num_blocks // batch_size * batch_size
    return torch.randperm(num_blocks, generator=random)[:used].tolist()


class MicroBatches:
    """The micro-batches of every step; their order depends on seed and step alone.

    So resuming needs no saved state, and any number of processes shares the same order.
    """

    def __init__(self, blocks: BlockDataset, options: TrainingOptions, device: torch.device):
        self._blocks, self._options, self._device = blocks, options, device
        self.steps_per_epoch = len(blocks) // options.batch_size
        targets = options.batch_size * (blocks.block_size - 1)  # all but a block's first token
        self._num_targets = torch.tensor(targets, device=device)

    def of_step(self, step: int) -> Iterator[dict[str, Tensor]]:
        """This process's share of a step, counted from 0: keyword arguments for the model."""
        options = self._options
        size = options.sequences
        epoch, place = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self._blocks), options.batch_size, options.seed, epoch)
        batch = order[place * options.batch_size :][: options.batch_size]
        for start in range(rank() * size, len(batch), world_size() * size):
            chosen = [self._blocks[index]["input_ids"] for index in batch[start : start + size]]
            input_ids = torch.stack(chosen)  # [micro batch, block]
            if self._device.type == "cuda":
                input_ids = input_ids.pin_memory()  # or the copy would wait for the GPU
            input_ids = input_ids.to(self._device, non_blocking=True)
            yield {
                "input_ids": input_ids,
                "labels": input_ids,
                "num_items_in_batch": self._num_targets,
            }
