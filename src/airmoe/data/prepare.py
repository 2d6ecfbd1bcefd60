"""Corpus + tokenizer -> a prepared folder: all or nothing, and it can go on.

Everything happens in `<out>.partial`, which gets its name at the very end. Progress is saved after
each finished shard, so that a prepare that was killed goes on from there, and ends with the bytes
that an undisturbed one would have written.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from airmoe.config import check_count, check_number, check_text, config
from airmoe.data.corpora import Corpus, open_corpus
from airmoe.data.documents import Document
from airmoe.data.prepared import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    Prepared,
    Recipe,
    open_prepared,
    partial_folder,
    read_manifest,
)
from airmoe.data.shards import SHARD_TOKENS, SplitInfo, SplitWriter
from airmoe.data.tokenizer_choice import bpe_vocab_size, is_trained, make_tokenizer
from airmoe.data.tokenizers import Tokenizer, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.files import LOCK, json_sha256, locked, read_as, sync_folder, sync_tree, write_json

PROGRESS_FILE = "progress.json"

# What may lie in the folder before there is a progress file.
_BEGINNING = {LOCK, f"{PROGRESS_FILE}.draft", TOKENIZER_FOLDER, f"{TOKENIZER_FOLDER}.draft"}

_BATCH_CHARACTERS = 1 << 20  # tokenized at once, on all cores


@config
class PrepareConfig:
    """What to prepare, and where to."""

    label: ClassVar[str] = "prepare"

    corpus: str
    """python-docs, wikitext103, c5, openwebtext2, or the path of a file or folder."""
    tokenizer: str
    """llama-3, bytes, bpe:<size>, or the path of a tokenizer: folder, tokenizer.json or .model."""
    out: str
    """The folder to make."""
    validation: str | None = None
    """Path of validation text, for a corpus with no official split."""
    validation_fraction: float = 0.005
    """Without official or given validation text: documents whose hash falls below this."""
    text_field: str = "text"
    """Where .jsonl and .parquet files keep the text."""
    max_tokens: int | None = None
    """End the train split after the document that reaches it."""

    def check(self) -> None:
        for name in ("corpus", "tokenizer", "out", "validation", "text_field"):
            value = getattr(self, name)
            if not (value is None and name == "validation"):
                check_text(f"prepare.{name}", value)
        check_number("prepare.validation_fraction", self.validation_fraction, below=1, strict=True)
        if self.max_tokens is not None:
            check_count("prepare.max_tokens", self.max_tokens)
        if is_trained(self.tokenizer):
            bpe_vocab_size(self.tokenizer)


@dataclass(frozen=True)
class PrepareProgress:
    """What has been read so far of one split of the corpus."""

    split: str
    documents: int
    tokens: int
    fraction: float | None
    """Of the split's input, or of `max_tokens` if that is nearer; None if unknown."""
    skipped: int = 0
    """Rows of the split whose text is null."""


Report = Callable[[PrepareProgress], None]


def prepare(
    config: PrepareConfig, report: Report | None = None, *, _shard_tokens: int = SHARD_TOKENS
) -> Prepared:
    """Make the folder, go on making it, or return it if it is already there."""
    corpus = _with_validation(open_corpus(config.corpus, config.text_field), config)
    recipe = _recipe(config, corpus)
    fixed = None if is_trained(config.tokenizer) else make_tokenizer(config.tokenizer)
    out = Path(config.out)
    if not os.path.lexists(out):  # a link that leads nowhere is in the way, too
        partial = partial_folder(out)
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial, "prepare.out", "is being prepared"):
            if out.exists():  # another process published it while we came here
                shutil.rmtree(partial)
            else:
                if not (partial / MANIFEST_FILE).exists():  # else only the name is missing
                    job = _Job(config, corpus, recipe, partial, fixed, report, _shard_tokens)
                    write_json(partial / MANIFEST_FILE, asdict(job.run()))
                _publish(partial, out)
    if not (out / MANIFEST_FILE).exists():
        rule = "is there already and was not made by prepare"
        raise ConfigError("prepare.out", str(out), rule, "Use another out.")
    manifest = read_manifest(out)
    other_tokenizer = fixed and not manifest.tokenizer.is_kept_by(fixed.identity)
    if manifest.recipe != recipe or other_tokenizer:
        rule = "was prepared with other settings, other text or another tokenizer"
        remedy = "Delete it or use another out. For train that is data.folder."
        raise ConfigError("prepare.out", str(out), rule, remedy)
    with suppress(OSError):  # of a process that was killed when it had given the folder its name
        (out / LOCK).unlink()
    return open_prepared(out, verify=False)


def _with_validation(corpus: Corpus, config: PrepareConfig) -> Corpus:
    """Add the validation text of the config: all of it, or its own validation split."""
    if config.validation is None:
        return corpus
    if "validation" in corpus.splits:
        rule = f"cannot be used, because the corpus {corpus.name} has its own validation split"
        raise ConfigError("prepare.validation", config.validation, rule, "Leave it out.")
    given = open_corpus(config.validation, config.text_field)
    text = given.splits.get("validation", given.splits["train"])
    splits = {**corpus.splits, "validation": text}
    return Corpus(corpus.name, f"{corpus.sha256}+{given.sha256}", splits)


def _recipe(config: PrepareConfig, corpus: Corpus) -> Recipe:
    if config.validation is not None:
        rule = f"validation is {Path(config.validation).name}"
    elif "validation" in corpus.splits:
        rule = "official splits"
    else:
        fraction = config.validation_fraction
        rule = f"validation if the first 8 bytes of sha256(text) / 2^64 < {fraction}"
    path = Path(config.tokenizer)
    return Recipe(
        corpus=corpus.name,
        corpus_sha256=corpus.sha256,
        tokenizer=path.resolve().name if path.exists() else config.tokenizer,
        split_rule=rule,
        text_field=config.text_field,
        max_tokens=config.max_tokens,
    )


def in_validation(text: str, fraction: float) -> bool:
    """The split rule: a text is always on the same side, whatever is around it."""
    if not fraction:
        return False
    head = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return int.from_bytes(head, "big") / 2**64 < fraction


def _publish(partial: Path, out: Path) -> None:
    """Give the finished folder its name, the last thing that happens."""
    (partial / PROGRESS_FILE).unlink(missing_ok=True)
    sync_folder(partial)
    partial.rename(out)  # still locked, or another process could come in between
    (out / LOCK).unlink(missing_ok=True)
    sync_folder(out.parent)


@dataclass(frozen=True)
class _Progress:
    """How far a prepare has come. Everything after it is done again."""

    asked: dict[str, Any]
    """What decides the result: settings, text and tokenizer."""
    written: dict[str, SplitInfo]


def _check_unchanged(values: Any) -> None:
    """Raise unless `values`, whose hash is taken out, are those that were written."""
    if not isinstance(values, dict) or values.pop("sha256", None) != json_sha256(values):
        raise ValueError("it has changed since it was written")


@dataclass
class _Job:
    """Reads the splits of the corpus one after another into shards in the folder."""

    config: PrepareConfig
    corpus: Corpus
    recipe: Recipe
    folder: Path
    fixed: Tokenizer | None  # None: it is trained on the corpus
    report: Report | None
    shard_tokens: int

    def __post_init__(self) -> None:
        is_given = "validation" in self.corpus.splits
        self._fraction = 0.0 if is_given else self.config.validation_fraction
        self._asked = {
            "format_version": FORMAT_VERSION,
            "recipe": asdict(self.recipe),
            "tokenizer": asdict(self.fixed.identity) if self.fixed else None,
            "shard_tokens": self.shard_tokens,
        }
        self._skipped = 0  # rows without text, of the split being read
        written = self._read_progress()
        self._tokenizer = self._saved_tokenizer()
        self._writers = {
            name: SplitWriter(self.folder, name, self.shard_tokens, written.get(name))
            for name in dict.fromkeys([*self.corpus.splits, "validation"])
        }

    def _read_progress(self) -> dict[str, SplitInfo]:
        """What an earlier prepare with the same settings has written, else nothing."""
        file = self.folder / PROGRESS_FILE
        if file.exists():
            progress = read_as(
                _Progress, file, "Use another out.", field="prepare.out", check=_check_unchanged
            )
            if progress.asked == self._asked:
                return progress.written
            if progress.written:
                raise ConfigError(
                    "prepare.out",
                    self.config.out,
                    "was begun with other settings, other text or another tokenizer "
                    f"(see {self.folder.name})",
                    f"Delete {self.folder} or use another out.",
                )
        elif foreign := sorted({path.name for path in self.folder.iterdir()} - _BEGINNING):
            rule = f"holds files that prepare did not make there, such as {foreign[0]}"
            remedy = "Move them away or use another out."
            raise ConfigError("prepare.out", str(self.folder), rule, remedy)
        # Nothing worth keeping was done, for instance because the settings were wrong.
        shutil.rmtree(self.folder / TOKENIZER_FOLDER, ignore_errors=True)
        return {}

    def _saved_tokenizer(self) -> Tokenizer:
        """Made now, if need be trained, where there is none; named only when it is whole."""
        folder = self.folder / TOKENIZER_FOLDER
        if folder.exists():
            return load_tokenizer(folder)
        texts = (document.text for document in self._documents("train"))
        trained_on = (text for text in texts if not in_validation(text, self._fraction))
        tokenizer = self.fixed or make_tokenizer(self.config.tokenizer, trained_on)
        draft = self.folder / f"{TOKENIZER_FOLDER}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        tokenizer.save(draft)
        sync_tree(draft)
        draft.rename(folder)
        self._save({})
        return tokenizer

    def _save(self, written: dict[str, SplitInfo]) -> None:
        values = asdict(_Progress(self._asked, written))
        write_json(self.folder / PROGRESS_FILE, {**values, "sha256": json_sha256(values)})

    def run(self) -> Manifest:
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.callback(writer.close)
            sources = [*self.corpus.splits]
            while len(sources) > 1 and self._writers[sources[1]].documents:
                sources.pop(0)  # was read to its end
            for source in sources:
                self._read(source)
            for writer in self._writers.values():
                writer.finish_shard()
        splits = self._written()
        for name, split in splits.items():
            if not split.tokens:
                shutil.rmtree(self.folder)  # other settings are needed, and would be refused
                raise ConfigError(
                    "prepare.corpus",
                    self.config.corpus,
                    f"has no text for its {name} split",
                    "Add documents that are more than white space, change validation_fraction, "
                    "or give validation text with validation=.",
                )
        return Manifest(FORMAT_VERSION, self.recipe, self._tokenizer.identity, splits)

    def _written(self) -> dict[str, SplitInfo]:
        return {name: writer.synced() for name, writer in self._writers.items()}

    def _read(self, source: str) -> None:
        """What has not been written of one split of the corpus."""
        # By hash, documents of the only split go to all writers.
        writers = [*self._writers.values()] if self._fraction else [self._writers[source]]
        count = sum(writer.documents for writer in writers)
        batches = _batches(itertools.islice(self._documents(source), count, None))
        while not self._is_full(source) and (batch := next(batches, None)):
            texts = [document.text for document in batch]
            for text, tokens in zip(texts, self._tokenizer.encode_documents(texts), strict=True):
                split = "validation" if in_validation(text, self._fraction) else source
                if self._writers[split].add(tokens):
                    self._save(self._written())
                if self._is_full(source):
                    break
            self._tell(source, writers, batch[-1].fraction)

    def _documents(self, source: str) -> Iterator[Document]:
        """Those of a split, while counting the rows that have no text."""
        self._skipped = 0
        for document in self.corpus.read(source):
            if document is None:
                self._skipped += 1
            else:
                yield document

    def _is_full(self, source: str) -> bool:
        limit = self.config.max_tokens
        return source == "train" and limit is not None and self._writers["train"].tokens >= limit

    def _tell(self, source: str, writers: list[SplitWriter], fraction: float | None) -> None:
        if self.report is None:
            return
        if source == "train" and self.config.max_tokens is not None:
            reached = self._writers["train"].tokens / self.config.max_tokens
            fraction = max(fraction or 0.0, min(1.0, reached))
        documents = sum(writer.documents for writer in writers)
        tokens = sum(writer.tokens for writer in writers)
        self.report(PrepareProgress(source, documents, tokens, fraction, self._skipped))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Lists of documents, each enough work for all cores."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
