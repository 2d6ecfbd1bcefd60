"""Text <-> token ids: Hugging Face tokenizers and plain bytes, one interface, saved in folders."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import tokenizers as library

from airmoe.data.shards import TOKEN_TYPE, Tokens
from airmoe.errors import ConfigError
from airmoe.files import build, json_sha256, parse_json, read_json

END_OF_TEXT = "<|endoftext|>"  # of the tokenizers made here

IDENTITY_FILE = "airmoe_tokenizer.json"
HUGGING_FACE_FILE = "tokenizer.json"
HUGGING_FACE_CONFIG = "tokenizer_config.json"
LLAMA3_FILE = "tokenizer.model"
SPECIALS_FILE = "special_tokens_map.json"  # where older ones keep the end of text
# The files of a Hugging Face tokenizer that are kept, if it has them.
HUGGING_FACE_FILES = (
    *(HUGGING_FACE_FILE, HUGGING_FACE_CONFIG, LLAMA3_FILE, "chat_template.jinja"),
    *(SPECIALS_FILE, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
)

BYTES_VOCAB = 257  # 256 bytes and the end of text


def tokenizer_error(given: object, rule: str, remedy: str) -> ConfigError:
    """A tokenizer, or the path of one, that cannot be used."""
    return ConfigError("tokenizer", str(given), rule, remedy)


@dataclass(frozen=True)
class TokenizerIdentity:
    """Tokenizers with equal identities turn every text into equal ids."""

    kind: Literal["bytes", "hugging-face", "llama-3"]
    vocab_size: int
    sha256: str
    eos_id: int
    bos_id: int | None = None
    """The token before every document, if there is one."""
    files_sha256: str | None = field(default=None, compare=False)
    """Of all files of a user's tokenizer, also those that change no id (a chat template). None for
    other kinds, and in folders prepared before they were hashed."""

    def is_kept_by(self, other: Self) -> bool:
        """Whether `other` is this tokenizer with the same files, where their hash is known."""
        return self == other and self.files_sha256 in (None, other.files_sha256)


class Tokenizer:
    """A `tokenizer.json`, downloaded or trained here, with the files that belong to it.

    Documents go through it whole, however long: the library splits by regular expression without
    recursion and merges with a heap, n log n for one word of n letters.
    """

    def __init__(self, files: dict[str, bytes], identity: TokenizerIdentity | None = None) -> None:
        self._files = files
        definition = files[HUGGING_FACE_FILE]
        self._library = library.Tokenizer.from_str(definition.decode())
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True  # "as plain text", contrary to its name
        if identity is None:
            vocab, eos_token = self._library.get_vocab(with_added_tokens=True), _eos_token(files)
            if eos_token not in vocab:
                rule, remedy = "is named as the end of text but has no id", "Correct eos_token in "
                raise tokenizer_error(eos_token, rule, f"{remedy}{HUGGING_FACE_CONFIG}.")
            hashes = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
            identity = TokenizerIdentity(
                kind="hugging-face",
                vocab_size=max(vocab.values()) + 1,
                sha256=hashlib.sha256(definition).hexdigest(),
                eos_id=vocab[eos_token],
                files_sha256=json_sha256(hashes),
            )
        self.identity = identity

    def encode(self, text: str) -> list[int]:
        """Ids of the text. No special is added, and one written in the text is plain text."""
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        """On all cores, by threads of the library."""
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_start(self, text: str) -> list[int]:
        """Ids of a document that begins like this, as `transformers` gives them."""
        bos_id = self.identity.bos_id
        return self.encode(text) if bos_id is None else [bos_id, *self.encode(text)]

    def encode_documents(self, texts: list[str]) -> list[Tokens]:
        """Ids of whole documents: as `encode_start`, then the end of text."""
        begin = [] if self.identity.bos_id is None else [self.identity.bos_id]
        end = self.identity.eos_id
        return [np.array([*begin, *ids, end], TOKEN_TYPE) for ids in self._encode_all(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; specials show as their names."""
        return self._library.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` and `AutoTokenizer` read."""
        folder.mkdir(parents=True, exist_ok=True)
        identity = json.dumps(asdict(self.identity), indent=2) + "\n"
        for name, content in (self._files | {IDENTITY_FILE: identity.encode()}).items():
            (folder / name).write_bytes(content)


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0-255; 256 ends a document."""

    def __init__(self) -> None:
        # The visible character that byte-level tokenizers write for each byte.
        others = map(chr, itertools.count(0x100))
        latin = [chr(byte) for byte in range(256)]
        visible = [one if one.isprintable() and one != " " else next(others) for one in latin]
        model = byte_level({character: byte for byte, character in enumerate(visible)})
        model.add_special_tokens([END_OF_TEXT])
        sha256 = hashlib.sha256(b"bytes").hexdigest()
        identity = TokenizerIdentity("bytes", BYTES_VOCAB, sha256, eos_id=BYTES_VOCAB - 1)
        super().__init__(hugging_face_files(model.to_str(), END_OF_TEXT), identity)

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Open what `Tokenizer.save` wrote."""
    try:
        identity = build(TokenizerIdentity, read_json(folder / IDENTITY_FILE))
        files = read_files(folder)
        tokenizer = BytesTokenizer() if identity.kind == "bytes" else Tokenizer(files)
        found = tokenizer.identity
        if identity.kind == "llama-3":  # known by another file
            sha256 = hashlib.sha256(files[LLAMA3_FILE]).hexdigest()
            found = replace(found, kind="llama-3", sha256=sha256)
    except Exception as error:  # the library raises plain Exception for a bad definition
        rule = f"is not a whole tokenizer folder ({type(error).__name__}: {error})"
        raise tokenizer_error(folder, rule, "Prepare the data again.") from error
    if not identity.is_kept_by(replace(found, bos_id=identity.bos_id)):
        rule = f"has changed since it was saved: {IDENTITY_FILE} describes another one"
        raise tokenizer_error(folder, rule, "Prepare the data again.")
    tokenizer.identity = identity
    return tokenizer


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer."""
    paths = {name: folder / name for name in HUGGING_FACE_FILES}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def _eos_token(files: dict[str, bytes]) -> str:
    settings = parse_json(files[HUGGING_FACE_CONFIG])
    if "eos_token" not in settings and SPECIALS_FILE in files:
        settings = parse_json(files[SPECIALS_FILE])
    eos = settings["eos_token"]
    return eos["content"] if isinstance(eos, dict) else eos


def hugging_face_files(
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


def byte_level(vocab: dict[str, int], *, split_words: bool = False) -> Any:
    """A `tokenizers.Tokenizer` over bytes written as printable characters, with no merges yet."""
    tokenizer: Any = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=split_words
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer
