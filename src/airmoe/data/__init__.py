"""Text -> tokens on disk -> blocks for training."""

from __future__ import annotations

from airmoe.data.prepare import PrepareConfig, PrepareProgress, prepare
from airmoe.data.prepared import Manifest, Prepared, Recipe, open_prepared
from airmoe.data.shards import BlockDataset, ShardInfo, SplitInfo
from airmoe.data.tokenizer_choice import make_tokenizer
from airmoe.data.tokenizers import Tokenizer, TokenizerIdentity, load_tokenizer

__all__ = [
    "BlockDataset",
    "Manifest",
    "PrepareConfig",
    "PrepareProgress",
    "Prepared",
    "Recipe",
    "ShardInfo",
    "SplitInfo",
    "Tokenizer",
    "TokenizerIdentity",
    "load_tokenizer",
    "make_tokenizer",
    "open_prepared",
    "prepare",
]
