"""Text -> tokens on disk -> blocks for training."""

from __future__ import annotations

from airmoe.data.blocks import BlockDataset
from airmoe.data.manifest import Manifest, Recipe, ShardInfo, SplitInfo
from airmoe.data.prepare import PrepareConfig, PrepareProgress, prepare
from airmoe.data.prepared import Prepared, open_prepared
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
