"""A prepared folder: what its `manifest.json` says, opened and checked."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airmoe.config import check_count, read_fields
from airmoe.data.shards import PREPARE_AGAIN, TOKEN_TYPE, BlockDataset, ShardInfo, SplitInfo
from airmoe.data.tokenizers import Tokenizer, TokenizerIdentity, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.files import file_sha256, read_json, write_json

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
class Manifest:
    """Everything about a prepared folder that equal ones have in common."""

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


@dataclass(frozen=True)
class Prepared:
    """Tokens of a corpus on disk, and the tokenizer that made them."""

    folder: Path
    manifest: Manifest

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        tokenizer = load_tokenizer(self.folder / TOKENIZER_FOLDER)
        if not self.manifest.tokenizer.is_kept_by(tokenizer.identity):
            rule = "holds another tokenizer than the one its manifest names"
            raise ConfigError("data", str(self.folder), rule, PREPARE_AGAIN)
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
        return BlockDataset(self.folder, info, block_size, self.manifest.tokenizer.vocab_size)

    def _split(self, name: str) -> SplitInfo:
        splits = self.manifest.splits
        if name not in splits:
            rule = f"is not one of {', '.join(splits)}"
            raise ConfigError("data.split", name, rule, "Choose one of these.")
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
        remedy = "Run the same `airmoe prepare` again to go on."
        raise ConfigError("data", str(folder), "is unfinished", remedy)
    manifest = read_manifest(folder)
    for split in manifest.splits.values():
        for shard in split.shards:
            _check_shard(folder, shard, verify=verify)
    return Prepared(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`."""
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise _not_prepared(folder)
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
        rule = f"is not a manifest of `airmoe prepare` ({type(error).__name__}: {error})"
        raise ConfigError("data", str(file), rule, PREPARE_AGAIN) from error
    rule = f"has format version {version}, this airmoe reads version {FORMAT_VERSION}"
    raise ConfigError("data", str(folder), rule, PREPARE_AGAIN)


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


def _check_shard(folder: Path, shard: ShardInfo, *, verify: bool) -> None:
    """Raise unless the file is there, has its size and, if asked, its content."""
    file = folder / shard.file
    rule = None
    if not file.is_file():
        rule = "is in the manifest but not in the folder"
    elif (size := file.stat().st_size) != (expected := shard.tokens * TOKEN_TYPE.itemsize):
        rule = f"has {size} bytes instead of {expected}"
    elif verify and file_sha256(file) != shard.sha256:
        rule = "is damaged: its sha256 is not the manifest's"
    if rule is not None:
        raise ConfigError("data", str(file), rule, f"Copy it again, or: {PREPARE_AGAIN}")


def _not_there(folder: Path) -> ConfigError:
    partial = partial_folder(folder)
    if partial.is_dir():
        rule = f"is not finished: there is only {partial.name}"
        remedy = "Run the same `airmoe prepare` again to go on."
        return ConfigError("data", str(folder), rule, remedy)
    if folder.exists():
        return _not_prepared(folder)
    out = shlex.quote(str(folder))
    remedy = f"Make it: airmoe prepare python-docs --tokenizer bpe:8192 --out {out}"
    return ConfigError("data", str(folder), "is not a folder", remedy)


def _not_prepared(path: Path) -> ConfigError:
    """For text, or anything else, in the place of prepared text."""
    found = "is a file"
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir())
        listed = f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"
        found = f"holds {listed}" if names else "is empty"
    out = shlex.quote(f"data/{path.resolve().name}")
    return ConfigError(
        "data",
        str(path),
        f"must be a folder that `airmoe prepare` wrote, but {found} and has no {MANIFEST_FILE}",
        f"If this is your text: airmoe prepare {shlex.quote(str(path))} --out {out} "
        f"(with the --tokenizer you want), then data.folder={out}",
    )
