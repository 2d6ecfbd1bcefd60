"""What a prepared folder says about itself: `manifest.json`."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airmoe.config import read_fields
from airmoe.data.tokenizers import TokenizerIdentity
from airmoe.errors import ConfigError
from airmoe.files import read_json, write_json

MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 1
PREPARE_AGAIN = "Run the `airmoe prepare` that made it again, with another --out, and use that."


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
    if not file.is_file():
        raise not_prepared(folder)
    try:
        values = read_json(file)
        version = values["format_version"]
        if version == FORMAT_VERSION:
            return Manifest(
                format_version=version,
                recipe=read_fields(Recipe, values["recipe"]),
                tokenizer=read_fields(TokenizerIdentity, values["tokenizer"]),
                splits={name: split_info(split) for name, split in values["splits"].items()},
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "data",
            str(file),
            f"is not a manifest of `airmoe prepare` ({type(error).__name__}: {error})",
            PREPARE_AGAIN,
        ) from error
    raise ConfigError(
        "data",
        str(folder),
        f"has format version {version}, this airmoe reads version {FORMAT_VERSION}",
        PREPARE_AGAIN,
    )


def not_prepared(path: Path) -> ConfigError:
    """For text, or anything else, in the place of prepared text."""
    found = "is a file"
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir())
        found = (
            f"holds {', '.join(names[:3])}{', ...' if names[3:] else ''}" if names else "is empty"
        )
    out = shlex.quote(f"data/{path.resolve().name}")
    return ConfigError(
        "data",
        str(path),
        f"must be a folder that `airmoe prepare` wrote, but {found} and has no {MANIFEST_FILE}",
        f"If this is your text: airmoe prepare {shlex.quote(str(path))} --out {out} "
        f"(with the --tokenizer you want), then data.folder={out}",
    )


def split_info(values: Any) -> SplitInfo:
    """Undo `asdict`; the numbers of tokens must agree, since the number of blocks follows them."""
    shards = tuple(read_fields(ShardInfo, shard) for shard in values["shards"])
    documents, tokens = values["documents"], values["tokens"]
    for number in (documents, tokens, *(shard.tokens for shard in shards)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{number!r} is no number of documents or tokens")
    if (total := sum(shard.tokens for shard in shards)) != tokens:
        raise ValueError(f"a split of {tokens} tokens has {total} in its shards")
    for shard in shards:
        if Path(shard.file).name != shard.file:
            raise ValueError(f"{shard.file!r} is no file of the folder itself")
    return SplitInfo(documents, tokens, shards)
