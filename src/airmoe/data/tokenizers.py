"""Text <-> token ids: Llama-3, Hugging Face, freshly trained BPE or plain bytes, one interface."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from airmoe.config import read_fields
from airmoe.errors import ConfigError, require
from airmoe.files import json_sha256, read_json

END_OF_TEXT = "<|endoftext|>"  # of the tokenizers made here

IDENTITY_FILE = "airmoe_tokenizer.json"
HUGGING_FACE_FILE = "tokenizer.json"
HUGGING_FACE_CONFIG = "tokenizer_config.json"
LLAMA3_FILE = "tokenizer.model"
# The files of a Hugging Face tokenizer that are kept, if it has them.
HUGGING_FACE_FILES = (
    *(HUGGING_FACE_FILE, HUGGING_FACE_CONFIG, LLAMA3_FILE, "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
)

BYTES_VOCAB = 257  # 256 bytes and the end of text


def tokenizer_error(given: object, rule: str, remedy: str) -> ConfigError:
    """A tokenizer, or the path of one, that cannot be used."""
    return ConfigError("tokenizer", str(given), rule, remedy)


@dataclass(frozen=True)
class TokenizerIdentity:
    """Tokenizers with equal identities turn every text into equal ids."""

    kind: str
    vocab_size: int
    sha256: str
    eos_id: int
    bos_id: int | None = None
    """The token before every document, if there is one."""
    files_sha256: str | None = field(default=None, compare=False)
    """Of all its files, also those that change no id (a chat template). None if none are kept, and
    in folders prepared before they were hashed."""

    def is_kept_by(self, other: TokenizerIdentity) -> bool:
        """Whether `other` is this tokenizer with the same files, where their hash is known."""
        return self == other and self.files_sha256 in (None, other.files_sha256)


class Tokenizer(ABC):
    """Picklable, so that worker processes can have it."""

    identity: TokenizerIdentity

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text. No special is added, and one written in the text is plain text."""

    def encode_document(self, text: str) -> list[int]:
        """Ids of a whole document: as `encode_start`, with the end of text behind them."""
        return [*self.encode_start(text), self.identity.eos_id]

    def encode_start(self, text: str) -> list[int]:
        """Ids of a document that begins like this, as the saved tokenizer will give them."""
        bos_id = self.identity.bos_id
        return self.encode(text) if bos_id is None else [bos_id, *self.encode(text)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; specials show as their names."""

    @abstractmethod
    def _files(self) -> dict[str, bytes]:
        """The files of this kind: name -> content."""

    def __getstate__(self) -> dict[str, Any]:
        made = {
            name for name, value in vars(type(self)).items() if isinstance(value, cached_property)
        }
        return {name: value for name, value in vars(self).items() if name not in made}

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        identity = json.dumps(asdict(self.identity), indent=2) + "\n"
        for name, content in (self._files() | {IDENTITY_FILE: identity.encode()}).items():
            (folder / name).write_bytes(content)


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0-255; 256 ends a document."""

    def __init__(self) -> None:
        sha256 = hashlib.sha256(b"bytes").hexdigest()
        self.identity = TokenizerIdentity("bytes", BYTES_VOCAB, sha256, eos_id=256)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        eos = END_OF_TEXT.encode()
        pieces = (eos if token == self.identity.eos_id else bytes((token,)) for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def _files(self) -> dict[str, bytes]:
        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        model = byte_level(vocab, split_words=False)
        model.add_special_tokens([END_OF_TEXT])
        return _hugging_face_files(model.to_str(), END_OF_TEXT)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, downloaded or trained here.

    Documents go through it whole, however long: the library splits by regular expression without
    recursion and merges with a heap, n log n for one word of n letters.
    """

    def __init__(
        self, definition: str, eos_token: str, files: dict[str, bytes] | None = None
    ) -> None:
        self._definition = definition
        self._kept = files or _hugging_face_files(definition, eos_token)
        vocab = self._library.get_vocab(with_added_tokens=True)
        if eos_token not in vocab:
            rule = "is named as the end of text but has no id"
            raise tokenizer_error(eos_token, rule, "Correct eos_token in tokenizer_config.json.")
        hashes = {name: hashlib.sha256(file).hexdigest() for name, file in self._kept.items()}
        self.identity = TokenizerIdentity(
            kind="hugging-face",
            vocab_size=max(vocab.values()) + 1,
            sha256=hashlib.sha256(definition.encode()).hexdigest(),
            eos_id=vocab[eos_token],
            files_sha256=json_sha256(hashes),
        )

    @cached_property
    def _library(self) -> Any:
        tokenizer = require("tokenizers", "for this tokenizer").Tokenizer.from_str(self._definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "as plain text", contrary to its name
        return tokenizer

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def _files(self) -> dict[str, bytes]:
        return self._kept


class Llama3Tokenizer(Tokenizer):
    """Llama 3's 128,000 byte pairs and 256 specials, with tiktoken."""

    # Facts of the format: how text is cut into words, and where the specials lie.
    _WORDS = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    _NUM_PAIRS = 128_000
    _NUM_SPECIALS = 256
    _NAMED_SPECIALS: ClassVar = {
        0: "begin_of_text",
        1: "end_of_text",
        6: "start_header_id",
        7: "end_header_id",
        9: "eot_id",
    }

    def __init__(self, model: bytes) -> None:
        self._model = model
        self.identity = TokenizerIdentity(
            kind="llama-3",
            vocab_size=self._NUM_PAIRS + self._NUM_SPECIALS,
            sha256=hashlib.sha256(model).hexdigest(),
            eos_id=self._NUM_PAIRS + 1,
        )

    @classmethod
    def from_file(cls, path: Path) -> Llama3Tokenizer:
        """Read and check a tiktoken model file."""
        tokenizer = cls(path.read_bytes())
        try:
            num_pairs = len(tokenizer._ranks())
            reason = None if num_pairs == cls._NUM_PAIRS else f"it has {num_pairs} entries"
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            rule = f"must be Llama 3's tiktoken file of {cls._NUM_PAIRS} entries, but {reason}"
            raise tokenizer_error(path, rule, "Give the tokenizer.model of Llama 3.")
        return tokenizer

    def _ranks(self) -> dict[bytes, int]:
        """Lines "base64 rank" -> ids of byte strings."""
        pairs = (line.split() for line in self._model.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}

    @cached_property
    def _encoding(self) -> Any:
        return require("tiktoken", "for the Llama-3 tokenizer").Encoding(
            name="llama-3",
            pat_str=self._WORDS,
            mergeable_ranks=self._ranks(),
            special_tokens={name: self._NUM_PAIRS + n for n, name in enumerate(self._specials())},
        )

    def _specials(self) -> list[str]:
        reserved = (f"reserved_special_token_{n}" for n in itertools.count())
        names = (self._NAMED_SPECIALS.get(n) or next(reserved) for n in range(self._NUM_SPECIALS))
        return [f"<|{name}|>" for name in names]

    @cached_property
    def _definition(self) -> str:
        """The same tokenizer as a tokenizer.json. It takes seconds to make."""
        module = require("transformers.convert_slow_tokenizer", "to write tokenizer.json")
        converter = module.TikTokenConverter(
            pattern=self._WORDS, extra_special_tokens=self._specials()
        )
        converter.load_tiktoken_bpe = lambda _: self._ranks()  # its own goes through a cache
        return converter.converted().to_str()

    def encode(self, text: str) -> list[int]:
        encode = self._encoding.encode_ordinary
        ids: list[int] = []
        for piece in safe_pieces(text):
            ids += encode(piece)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(ids)

    def _files(self) -> dict[str, bytes]:
        begin, end, *_ = self._specials()
        return {LLAMA3_FILE: self._model, **_hugging_face_files(self._definition, end, begin)}


def safe_pieces(text: str, limit: int = 25_000) -> Iterator[str]:
    """Cut text that tiktoken's regular expression would choke on; most text comes back whole.

    A cut before a space that follows a visible character changes no id: every word of Llama 3
    ends there anyway. Only `limit` characters with no such place are cut in the middle.
    """
    start = 0
    while len(text) - start > limit:
        cut = text.rfind(" ", start + 1, start + limit)
        while cut > start and text[cut - 1].isspace():
            cut = text.rfind(" ", start + 1, cut)
        cut = cut if cut > start else start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Open what `Tokenizer.save` wrote, and check that it still is what it was."""
    try:
        expected = read_fields(TokenizerIdentity, read_json(folder / IDENTITY_FILE))
        tokenizer = _read_kind(expected, folder)
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception for a bad definition
        rule = f"is not a whole tokenizer folder ({type(error).__name__}: {error})"
        raise tokenizer_error(folder, rule, "Prepare the data again.") from error
    if not expected.is_kept_by(tokenizer.identity):
        rule = f"has changed since it was saved: {IDENTITY_FILE} describes another one"
        raise tokenizer_error(folder, rule, "Prepare the data again.")
    return tokenizer


def _read_kind(identity: TokenizerIdentity, folder: Path) -> Tokenizer:
    if identity.kind == "bytes":
        return BytesTokenizer()
    if identity.kind == "llama-3":
        return Llama3Tokenizer.from_file(folder / LLAMA3_FILE)
    if identity.kind == "hugging-face":
        tokenizer = read_hugging_face(folder)
        tokenizer.identity = replace(tokenizer.identity, bos_id=identity.bos_id)
        return tokenizer
    raise ValueError(f"unknown kind {identity.kind!r}")


def read_hugging_face(folder: Path) -> HuggingFaceTokenizer:
    """Read the tokenizer's own files: `tokenizer_config.json` names the end of text."""
    settings = read_json(folder / HUGGING_FACE_CONFIG)
    names = folder / "special_tokens_map.json"  # where older ones keep the end of text
    if "eos_token" not in settings and names.is_file():
        settings = read_json(names)
    eos = settings["eos_token"]
    paths = {name: folder / name for name in HUGGING_FACE_FILES}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return HuggingFaceTokenizer(
        files[HUGGING_FACE_FILE].decode("utf-8"),
        eos["content"] if isinstance(eos, dict) else eos,
        files,
    )


def _hugging_face_files(
    definition: str, eos_token: str, bos_token: str | None = None
) -> dict[str, bytes]:
    """The files that `transformers.AutoTokenizer.from_pretrained(folder)` opens."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        **({"bos_token": bos_token} if bos_token else {}),
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    return {HUGGING_FACE_FILE: definition.encode(), HUGGING_FACE_CONFIG: text.encode()}


def byte_level(vocab: dict[str, int], *, split_words: bool) -> Any:
    """A `tokenizers.Tokenizer` over bytes written as printable characters, with no merges yet."""
    library = require("tokenizers", "for this tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=split_words
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, a fact of theirs."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
