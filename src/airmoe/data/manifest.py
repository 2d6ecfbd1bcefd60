"""What a prepared folder says about itself: `manifest.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airmoe.data.tokenizers import TokenizerIdentity
from airmoe.errors import ConfigError
from airmoe.files import write_json

MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 1


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
class ShardInfo:
    """One file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """Shards in reading order."""

    documents: int = 0
    tokens: int = 0
    shards: tuple[ShardInfo, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The whole truth about a prepared folder, with nothing that differs between equal ones."""

    format_version: int
    recipe: Recipe
    tokenizer: TokenizerIdentity
    splits: dict[str, SplitInfo]

    @property
    def corpus(self) -> str:
        return self.recipe.corpus

    @property
    def split_rule(self) -> str:
        return self.recipe.split_rule

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST_FILE, asdict(self))


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`."""
    file = folder / MANIFEST_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        version = values["format_version"]
        if version == FORMAT_VERSION:
            return Manifest(
                format_version=version,
                recipe=Recipe(**values["recipe"]),
                tokenizer=TokenizerIdentity(**values["tokenizer"]),
                splits={name: split_info(split) for name, split in values["splits"].items()},
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "data",
            str(file),
            f"is missing or not a manifest ({type(error).__name__}: {error})",
            "Delete the folder and run `airmoe prepare` again.",
        ) from error
    raise ConfigError(
        "data",
        str(folder),
        f"has format version {version}, this airmoe reads version {FORMAT_VERSION}",
        "Delete the folder and run `airmoe prepare` again.",
    )


def split_info(values: Mapping[str, Any]) -> SplitInfo:
    """Undo `asdict`."""
    shards = tuple(ShardInfo(**shard) for shard in values["shards"])
    return SplitInfo(int(values["documents"]), int(values["tokens"]), shards)
