"""A prepared folder, opened and checked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from airmoe.config import check_count
from airmoe.data.blocks import BlockDataset
from airmoe.data.manifest import (
    MANIFEST_FILE,
    PREPARE_AGAIN,
    TOKENIZER_FOLDER,
    Manifest,
    SplitInfo,
    not_prepared,
    read_manifest,
)
from airmoe.data.shards import check_shard
from airmoe.data.tokenizers import Tokenizer, load_tokenizer
from airmoe.errors import ConfigError


@dataclass(frozen=True)
class Prepared:
    """Tokens of a corpus on disk, and the tokenizer that made them."""

    folder: Path
    manifest: Manifest

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        tokenizer = load_tokenizer(self.folder / TOKENIZER_FOLDER)
        if not self.manifest.tokenizer.is_kept_by(tokenizer.identity):
            raise ConfigError(
                "data",
                str(self.folder),
                "holds another tokenizer than the one its manifest names",
                PREPARE_AGAIN,
            )
        return tokenizer

    def tokens(self, split: str) -> int:
        """How many tokens a split has, ends of documents included."""
        return self._split(split).tokens

    def blocks(self, split: str, block_size: int) -> BlockDataset:
        """The split cut into blocks of `block_size` tokens."""
        check_count("data.block_size", block_size)
        info = self._split(split)
        if info.tokens < block_size:
            raise ConfigError(
                "data.block_size",
                block_size,
                f"must be <= {info.tokens}, the tokens of split '{split}'",
                "Use a smaller block_size or prepare more text.",
            )
        return BlockDataset(self.folder, info, block_size, self.manifest.tokenizer.vocab_size)

    def _split(self, name: str) -> SplitInfo:
        splits = self.manifest.splits
        if name not in splits:
            raise ConfigError(
                "data.split", name, f"is not one of {', '.join(splits)}", "Choose one of these."
            )
        return splits[name]


def partial_folder(out: Path) -> Path:
    """Where `prepare` works before the result gets its name."""
    return out.with_name(out.name + ".partial")


def open_prepared(folder: str | Path, *, verify: bool = True) -> Prepared:
    """Open what `prepare` made; `verify` also reads every shard and compares its sha256."""
    folder = Path(folder)
    if not folder.is_dir():
        raise _not_there(folder)
    if not (folder / MANIFEST_FILE).exists() and folder.name.endswith(".partial"):
        raise ConfigError(
            "data", str(folder), "is unfinished", "Run the same `airmoe prepare` again to go on."
        )
    manifest = read_manifest(folder)
    for split in manifest.splits.values():
        for shard in split.shards:
            check_shard(folder, shard, verify=verify)
    return Prepared(folder, manifest)


def _not_there(folder: Path) -> ConfigError:
    if partial_folder(folder).is_dir():
        return ConfigError(
            "data",
            str(folder),
            f"is not finished: there is only {partial_folder(folder).name}",
            "Run the same `airmoe prepare` again to go on.",
        )
    if folder.exists():
        return not_prepared(folder)
    return ConfigError(
        "data",
        str(folder),
        "is not a folder",
        f"Make it: airmoe prepare python-docs --tokenizer bpe:8192 --out "
        f"{shlex.quote(str(folder))}",
    )
