"""A prepared folder: what its `manifest.json` says, opened and checked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe.config import check_count
from airmoe.data.shards import TOKEN_TYPE, BlockDataset, SplitInfo
from airmoe.data.tokenizers import Tokenizer, TokenizerIdentity, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.files import file_sha256, read_as

MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 1

_PREPARE_AGAIN = "Run the `airmoe prepare` that made it again, with another --out, and use that."


@dataclass(frozen=True)
class Recipe:
    """Everything asked for that decides the tokens. Paths are names only: folders may move."""

    corpus: str
    corpus_sha256: str
    tokenizer: str
    split_rule: str
    text_field: str
    max_tokens: int | None


@dataclass(frozen=True)
class Manifest:
    """Everything about a prepared folder that equal ones have in common."""

    format_version: int
    recipe: Recipe
    tokenizer: TokenizerIdentity
    splits: dict[str, SplitInfo]


@dataclass(frozen=True)
class Prepared:
    """Tokens of a corpus on disk, and the tokenizer that made them."""

    folder: Path
    manifest: Manifest

    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.folder / TOKENIZER_FOLDER)
        if not self.manifest.tokenizer.is_kept_by(tokenizer.identity):
            rule = "holds another tokenizer than the one its manifest names"
            raise ConfigError("data", str(self.folder), rule, _PREPARE_AGAIN)
        return tokenizer

    def tokens(self, split: str) -> int:
        """How many tokens a split has, ends of documents included."""
        return self._split(split).tokens

    def blocks(self, split: str, block_size: int) -> BlockDataset:
        """The split cut into blocks of `block_size` tokens."""
        check_count("data.block_size", block_size)
        info = self._split(split)
        if info.tokens < block_size:
            rule = f"must be <= {info.tokens}, the tokens of split '{split}'"
            remedy = "Use a smaller block_size or prepare more text."
            raise ConfigError("data.block_size", block_size, rule, remedy)
        return BlockDataset(self.folder, info, block_size)

    def _split(self, name: str) -> SplitInfo:
        splits = self.manifest.splits
        if name not in splits:
            rule = f"is not one of {', '.join(splits)}"
            raise ConfigError("split", name, rule, "Choose one of these.")
        return splits[name]


def partial_folder(out: Path) -> Path:
    """Where `prepare` works before the result gets its name."""
    return out.with_name(out.name + ".partial")


def open_prepared(folder: str | Path, *, verify: bool = True) -> Prepared:
    """Open what `prepare` made; `verify` also reads every shard and compares its sha256."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        file, expected = folder / shard.file, shard.tokens * TOKEN_TYPE.itemsize
        if not file.is_file():
            rule = "is in the manifest but not in the folder"
        elif (size := file.stat().st_size) != expected:
            rule = f"has {size} bytes instead of {expected}"
        elif verify and file_sha256(file) != shard.sha256:
            rule = "is damaged: its sha256 is not the manifest's"
        else:
            continue
        raise ConfigError("data", str(file), rule, f"Copy it again, or: {_PREPARE_AGAIN}")
    return Prepared(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise _not_prepared(folder)
    manifest = read_as(Manifest, file, _PREPARE_AGAIN, field="data", check=_check_version)
    for name, split in manifest.splits.items():
        # Blocks are cut by these numbers.
        if (total := sum(shard.tokens for shard in split.shards)) != split.tokens:
            rule = f"says {split.tokens} tokens in its {name} split, but {total} in its shards"
            raise ConfigError("data", str(file), rule, _PREPARE_AGAIN)
    return manifest


def _check_version(values: Any) -> None:
    found = values.get("format_version") if isinstance(values, dict) else None
    if type(found) is not int or found != FORMAT_VERSION:
        raise ValueError(f"format version {found}, this airmoe reads {FORMAT_VERSION}")


def _not_prepared(path: Path) -> ConfigError:
    """For nothing, unfinished work, or text in the place of prepared text."""
    missing = not path.exists()
    if path.name.endswith(".partial") or (missing and partial_folder(path).is_dir()):
        remedy = "Run the same `airmoe prepare` again to go on."
        return ConfigError("data", str(path), "is not finished", remedy)
    if missing:
        command = f"airmoe prepare python-docs --tokenizer bpe:8192 --out {shlex.quote(str(path))}"
        return ConfigError("data", str(path), "is not a folder", f"Make it: {command}")
    out = shlex.quote(f"data/{path.resolve().name}")
    return ConfigError(
        "data",
        str(path),
        f"must be a folder that `airmoe prepare` wrote, but has no {MANIFEST_FILE}",
        f"If this is your text: airmoe prepare {shlex.quote(str(path))} --out {out} "
        f"(with the --tokenizer you want), then data.folder={out}",
    )
