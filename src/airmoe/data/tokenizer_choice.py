"""The name of a tokenizer -> the tokenizer: found, opened or trained."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import pre_tokenizers, trainers

from airmoe.data.tokenizers import (
    BYTES_VOCAB,
    END_OF_TEXT,
    HUGGING_FACE_CONFIG,
    HUGGING_FACE_FILE,
    IDENTITY_FILE,
    LLAMA3_FILE,
    BytesTokenizer,
    Tokenizer,
    TokenizerIdentity,
    byte_level,
    hugging_face_files,
    load_tokenizer,
    read_files,
    tokenizer_error,
)
from airmoe.errors import ConfigError

# Words, digits, spaces and a character of three bytes: what tokenizers treat differently.
_PROBE = "Return the  2024 items,\n\tas 東京 do."

_TRAINING_CHARACTERS = 1 << 25  # more text changes few merges and costs minutes

# How well-known bare tokenizer.json files call the end of text.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")

# Facts of Llama 3: how text is cut into words, and its 256 specials after 128,000 byte pairs.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PAIRS = 128_000
_LLAMA3_SPECIALS = {
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    9: "eot_id",
}


def make_tokenizer(name: str, corpus: Iterable[str] = ()) -> Tokenizer:
    """ "llama-3", "bytes", "bpe:8192" (trained on the texts of `corpus`) or a path."""
    if name == "bytes":
        return BytesTokenizer()
    if name == "llama-3":
        return _read_llama3(_installed_llama3())
    if is_trained(name):
        return _train_bpe(bpe_vocab_size(name), corpus)
    path = Path(name)
    if not path.exists():
        known = "llama-3, bytes, bpe:<vocabulary size>"
        rule = f"must be {known}, or the path of a tokenizer that exists"
        raise tokenizer_error(name, rule, "Check the spelling.")
    return _open_path(path)


def is_trained(name: str) -> bool:
    """Whether the tokenizer of that name comes out of the corpus."""
    return name.startswith("bpe:")


def bpe_vocab_size(name: str) -> int:
    """ "bpe:8192" -> 8192."""
    size = name.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit()) or int(size) < BYTES_VOCAB:
        rule = f"must be bpe:<vocabulary size> with a size >= {BYTES_VOCAB}"
        raise tokenizer_error(name, rule, "Write for example bpe:8192.")
    return int(size)


def _open_path(path: Path) -> Tokenizer:
    if path.suffix == ".model" and path.is_file():
        return _read_llama3(path)
    if (path / IDENTITY_FILE).exists():
        return load_tokenizer(path)
    folder = path if path.is_dir() else path.parent
    file = folder / HUGGING_FACE_FILE
    if not file.is_file() or path not in (folder, file):
        rule = f"is neither a folder with {HUGGING_FACE_FILE}, nor that file, nor a .model file"
        remedy = "Save a fast tokenizer with save_pretrained and give its folder."
        raise tokenizer_error(path, rule, remedy)
    try:
        configured = (folder / HUGGING_FACE_CONFIG).exists()
        tokenizer = Tokenizer(read_files(folder)) if configured else _open_bare(file)
        bos_id = _bos_id(tokenizer, path)
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception for a bad definition
        raise tokenizer_error(
            path,
            f"could not be opened ({type(error).__name__}: {error})",
            "Save it again with save_pretrained; tokenizer_config.json must name the eos_token.",
        ) from error
    tokenizer.identity = replace(tokenizer.identity, bos_id=bos_id)
    return tokenizer


def _bos_id(tokenizer: Tokenizer, path: Path) -> int | None:
    """What `transformers` will put before a text once this tokenizer is saved with a model.

    Training text must look the same, so whatever else it would change is refused.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    plain = tokenizer.encode(_PROBE)
    with tempfile.TemporaryDirectory() as copy:
        tokenizer.save(Path(copy))
        try:
            opened = AutoTokenizer.from_pretrained(
                copy, local_files_only=True, trust_remote_code=False
            )
        except Exception:  # it does not say which class it is of, or needs code of its own
            opened = PreTrainedTokenizerFast.from_pretrained(copy, local_files_only=True)
        used = opened(_PROBE)["input_ids"]
    ends = ([], [tokenizer.identity.eos_id])
    for begin in (0, 1):
        if used[begin : begin + len(plain)] == plain and used[begin + len(plain) :] in ends:
            return used[0] if begin else None
    raise tokenizer_error(
        path,
        f"turns {_PROBE!r} into {used} with transformers, but tokenizer.json says {plain}, with at "
        "most one token before and eos_token after it",
        "Open it with transformers.AutoTokenizer and save it again with save_pretrained.",
    )


def _open_bare(file: Path) -> Tokenizer:
    """A tokenizer.json with no tokenizer_config.json beside it."""
    definition = file.read_text(encoding="utf-8")
    added = {token["content"] for token in json.loads(definition).get("added_tokens", [])}
    for name in _END_OF_TEXT_NAMES:
        if name in added:
            return Tokenizer(hugging_face_files(definition, name))
    remedy = 'Put {"eos_token": "..."} into tokenizer_config.json beside it.'
    raise tokenizer_error(file, "does not say which token ends a text", remedy)


def _installed_llama3() -> Path:
    """The file that PyPI's llama-models brings along, found without importing the package."""
    spec = importlib.util.find_spec("llama_models")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "llama3" / LLAMA3_FILE
        if file.exists():
            return file
    rule = "needs the package llama-models, which brings its file and is not installed"
    remedy = "Run: pip install 'airmoe[data]', or give the path of Llama 3's tokenizer.model."
    raise tokenizer_error("llama-3", rule, remedy)


def _read_llama3(path: Path) -> Tokenizer:
    """Llama 3's file, lines of "base64 rank", made into a tokenizer.json. It takes seconds."""
    model = path.read_bytes()
    try:
        pairs = (line.split() for line in model.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        reason = None if len(ranks) == _LLAMA3_PAIRS else f"it has {len(ranks)} entries"
    except ValueError as error:
        ranks, reason = {}, str(error)
    if reason is not None:
        rule = f"must be Llama 3's tiktoken file of {_LLAMA3_PAIRS} entries, but {reason}"
        raise tokenizer_error(path, rule, "Give the tokenizer.model of Llama 3.")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    reserved = (f"reserved_special_token_{n}" for n in itertools.count())
    names = [_LLAMA3_SPECIALS.get(n) or next(reserved) for n in range(256)]
    specials = [f"<|{name}|>" for name in names]
    converter = TikTokenConverter(pattern=_LLAMA3_WORDS, extra_special_tokens=specials)
    converter.load_tiktoken_bpe = lambda tiktoken_url: ranks  # its own would go through a cache
    files = hugging_face_files(converter.converted().to_str(), specials[1], specials[0])
    identity = TokenizerIdentity(
        kind="llama-3",
        vocab_size=_LLAMA3_PAIRS + len(specials),
        sha256=hashlib.sha256(model).hexdigest(),
        eos_id=_LLAMA3_PAIRS + 1,
    )
    return Tokenizer({LLAMA3_FILE: model, **files}, identity)


def _train_bpe(vocab_size: int, corpus: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` ids, the same for the same texts."""
    tokenizer = byte_level({}, split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    if (reached := tokenizer.get_vocab_size()) < vocab_size:
        rule = f"is more than the training text yields: it gives only {reached} tokens"
        remedy = f"Use bpe:{reached} or less, or more text."
        raise tokenizer_error(f"bpe:{vocab_size}", rule, remedy)
    return Tokenizer(hugging_face_files(tokenizer.to_str(), END_OF_TEXT))


def _sample(corpus: Iterable[str]) -> Iterator[str]:
    """The first texts, up to the bound."""
    left = _TRAINING_CHARACTERS
    for text in corpus:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
