"""From a run's data options to prepared tokens, preparing them the first time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from airmoe.data import PrepareConfig, Prepared, PrepareProgress, open_prepared, prepare
from airmoe.data.tokenizer_choice import is_trained, make_tokenizer
from airmoe.errors import ConfigError
from airmoe.training.config import DataOptions


def data_folder(data: DataOptions) -> Path:
    """Where the prepared tokens of these options lie."""
    if data.folder is not None:
        return Path(data.folder)
    corpus = Path(data.corpus).name if "/" in data.corpus else data.corpus
    tokenizer = Path(data.tokenizer).name if "/" in data.tokenizer else data.tokenizer
    return Path("data") / re.sub(r"[^\w.-]+", "-", f"{corpus}-{tokenizer}")


def prepare_config(data: DataOptions) -> PrepareConfig:
    return PrepareConfig(
        corpus=data.corpus,
        tokenizer=data.tokenizer,
        out=str(data_folder(data)),
        validation=data.validation,
        validation_fraction=data.validation_fraction,
        max_tokens=data.max_tokens,
    )


def prepared_data(
    data: DataOptions, report: Callable[[PrepareProgress], None] | None = None
) -> Prepared:
    """The tokens of a run, every shard verified; made now if they do not exist yet.

    A folder that was named is taken for what it is; only its tokenizer must be the one asked for.
    """
    folder = data_folder(data)
    if data.folder is None or not folder.exists():
        prepare(prepare_config(data), report)
        return open_prepared(folder)
    prepared = open_prepared(folder)
    found = prepared.manifest
    same_name = found.recipe.tokenizer == data.tokenizer
    if not same_name and (
        is_trained(data.tokenizer) or make_tokenizer(data.tokenizer).identity != found.tokenizer
    ):
        raise ConfigError(
            "data.tokenizer",
            data.tokenizer,
            f"must be {found.recipe.tokenizer}, with which {folder} was prepared",
            f"Set data.tokenizer={found.recipe.tokenizer}, or prepare the text again.",
        )
    return prepared


def check_blocks(num_blocks: int, batch_size: int, block_size: int) -> None:
    """Training needs one optimizer step's worth of text at least."""
    if num_blocks < batch_size:
        raise ConfigError(
            "training.batch_size",
            batch_size,
            f"must be <= {num_blocks}, the blocks of {block_size} tokens in the training text",
            "Use more text, shorter blocks (data.block_size) or a smaller batch.",
        )
