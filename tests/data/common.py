"""Small corpora, and folders as values that can be compared."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from airmoe import ConfigError
from airmoe.data import PrepareConfig, Prepared, prepare

WORDS = ("token", "expert", "router", "layer", "model", "über", "naïve", "東京", "⚙️", "the", "of")


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Different texts of 1 to 40 words, some with line breaks."""
    generator = random.Random(seed)
    return [
        f"{number}: "
        + "".join(generator.choice(WORDS) + generator.choice("  \n") for _ in range(n))
        for number, n in enumerate(generator.choices(range(1, 41), k=count))
    ]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, by relative name."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def prepare_texts(
    folder: Path, texts: list[str], *, shard_tokens: int = 3000, validation_fraction: float = 0.2
) -> Prepared:
    """The texts as bytes in `folder / out`, in many small shards."""
    corpus = write_jsonl(folder / "corpus.jsonl", texts)
    config = PrepareConfig(
        corpus=str(corpus),
        tokenizer="bytes",
        out=str(folder / "out"),
        validation_fraction=validation_fraction,
        workers=1,
    )
    return prepare(config, _shard_tokens=shard_tokens)


def assert_one_line(raised: pytest.ExceptionInfo[ConfigError], *parts: str) -> None:
    """The message fits a terminal line's worth of reading and holds every part."""
    message = str(raised.value)
    assert "\n" not in message, message
    for part in parts:
        assert part in message, message
