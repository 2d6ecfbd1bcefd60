"""Small corpora, and folders as values that can be compared."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from airmoe import ConfigError
from airmoe.data import PrepareConfig, Prepared, make_tokenizer, prepare

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


def save_own(folder: Path, single: str | None, **options: Any) -> Path:
    """A Hugging Face tokenizer as a user has one, with specials and settings of its own."""
    make_tokenizer("bpe:400", make_texts(300)).save(folder / "plain")
    backend = Tokenizer.from_file(str(folder / "plain" / "tokenizer.json"))
    specials = ["<s>", "</s>", "<pad>", "[SEP]"]
    backend.add_special_tokens(specials)
    if single is not None:
        ids = [(name, backend.token_to_id(name)) for name in specials]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    own = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=77,
        chat_template="{% for m in messages %}<s>{{ m.content }}{% endfor %}",
        **options,
    )
    own.save_pretrained(folder / "own")
    return folder / "own"


SHARD_TOKENS = 3000


def settings(folder: Path, **options: Any) -> PrepareConfig:
    values: dict[str, Any] = {"corpus": str(folder / "corpus.jsonl"), "out": str(folder / "out")}
    values |= {"tokenizer": "bytes"} | options
    return PrepareConfig(**values)


def made(folder: Path, *, shard_tokens: int = SHARD_TOKENS, **options: Any) -> Prepared:
    """`folder / corpus.jsonl` as bytes in `folder / out`, in many small shards."""
    return prepare(settings(folder, **options), _shard_tokens=shard_tokens)


def prepare_texts(folder: Path, texts: list[str]) -> Prepared:
    write_jsonl(folder / "corpus.jsonl", texts)
    return made(folder, validation_fraction=0.2)


@contextmanager
def refused(*parts: str, without: tuple[str, ...] = ()) -> Iterator[None]:
    """The block raises a ConfigError of one line that holds every part."""
    with pytest.raises(ConfigError) as raised:
        yield
    message = str(raised.value)
    assert "\n" not in message, message
    for part in parts:
        assert part in message, message
    for part in without:
        assert part not in message, message
