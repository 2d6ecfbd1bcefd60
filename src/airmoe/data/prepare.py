"""Corpus + tokenizer -> a prepared folder: in parallel, all or nothing, and it can go on.

Everything happens in `<out>.partial`, which gets its name at the very end. After each finished
shard the progress is saved; a prepare that was killed goes on from there and ends with the very
bytes an undisturbed one would have written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from airmoe.config import check_count, check_number, config
from airmoe.data.corpora import Corpus, open_corpus
from airmoe.data.documents import Document
from airmoe.data.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest, Recipe, read_manifest
from airmoe.data.parallel import Encoder, EncoderPool, in_validation
from airmoe.data.prepared import Prepared, open_prepared
from airmoe.data.shards import SHARD_TOKENS, SplitWriter, WriterState
from airmoe.data.tokenizer_choice import bpe_vocab_size, is_trained, make_tokenizer
from airmoe.data.tokenizers import Tokenizer
from airmoe.data.workspace import Progress, Workspace
from airmoe.errors import ConfigError

_BATCH_CHARACTERS = 1 << 18


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
    workers: int | None = None
    """Processes; None takes all cores."""

    def check(self) -> None:
        for name in ("corpus", "tokenizer", "out", "validation", "text_field"):
            value = getattr(self, name)
            missing = name == "validation" and value is None
            if not missing and not (isinstance(value, str) and value):
                raise ConfigError(f"prepare.{name}", value, "must be a text", "Give a string.")
        check_number("prepare.validation_fraction", self.validation_fraction, below=1, strict=True)
        for name in ("max_tokens", "workers"):
            if getattr(self, name) is not None:
                check_count(f"prepare.{name}", getattr(self, name))
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
        with Workspace(out) as workspace:
            if not workspace.is_complete():
                begin = Progress(recipe, _shard_tokens, fixed and fixed.identity)
                progress = workspace.start(begin)
                tokenizer = _tokenizer(config, corpus, workspace, fixed)
                progress = replace(progress, tokenizer=tokenizer.identity)
                workspace.save(progress)
                job = _Job(config, corpus, tokenizer, workspace, progress, report)
                workspace.complete(job.run())
            workspace.publish()
    former = replace(recipe, corpus_sha256=corpus.former_sha256)
    return _existing(out, (recipe, former), fixed)


def _with_validation(corpus: Corpus, config: PrepareConfig) -> Corpus:
    """Add the validation text of the config: all of it, or its own validation split."""
    if config.validation is None:
        return corpus
    if "validation" in corpus.splits:
        raise ConfigError(
            "prepare.validation",
            config.validation,
            f"cannot be used, because the corpus {corpus.name} has its own validation split",
            "Leave it out.",
        )
    given = open_corpus(config.validation, config.text_field)
    text = given.splits.get("validation", given.splits["train"])
    return Corpus(
        corpus.name,
        f"{corpus.sha256}+{given.sha256}",
        f"{corpus.former_sha256}+{given.former_sha256}",
        {**corpus.splits, "validation": text},
    )


def _hashed_fraction(corpus: Corpus, config: PrepareConfig) -> float:
    """The fraction of the hash rule; 0 where validation text is given."""
    return 0.0 if "validation" in corpus.splits else config.validation_fraction


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


def _existing(out: Path, recipes: tuple[Recipe, ...], fixed: Tokenizer | None) -> Prepared:
    """The finished folder, if it is what was asked for."""
    if not (out / MANIFEST_FILE).exists():
        raise ConfigError(
            "prepare.out",
            str(out),
            "is there already and was not made by prepare",
            "Use another out.",
        )
    manifest = read_manifest(out)
    same_tokenizer = fixed is None or manifest.tokenizer.is_kept_by(fixed.identity)
    if manifest.recipe not in recipes or not same_tokenizer:
        raise ConfigError(
            "prepare.out",
            str(out),
            "was prepared with other settings, other text or another tokenizer",
            "Delete it or use another out. For train that is data.folder.",
        )
    return open_prepared(out, verify=False)


def _tokenizer(
    config: PrepareConfig, corpus: Corpus, workspace: Workspace, fixed: Tokenizer | None
) -> Tokenizer:
    """The tokenizer that an earlier prepare saved, else the fixed one, else a trained one."""
    if (saved := workspace.saved_tokenizer()) is not None:
        return saved
    fraction = _hashed_fraction(corpus, config)
    tokenizer = fixed or make_tokenizer(config.tokenizer, _training_texts(corpus, fraction))
    workspace.save_tokenizer(tokenizer)
    return tokenizer


def _training_texts(corpus: Corpus, fraction: float) -> Iterator[str]:
    """Texts to train a tokenizer on: never one of the validation split."""
    for document in corpus.splits["train"].documents():
        if document is not None and not in_validation(document.text, fraction):
            yield document.text


class _Job:
    """Reads the splits of the corpus one after another into the writers of a workspace."""

    def __init__(
        self,
        config: PrepareConfig,
        corpus: Corpus,
        tokenizer: Tokenizer,
        workspace: Workspace,
        progress: Progress,
        report: Report | None,
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._workspace = workspace
        self._progress = progress
        self._report = report
        self._validation_fraction = _hashed_fraction(corpus, config)
        self._input_fraction: float | None = None
        self._skipped = 0
        names = [*corpus.splits, *(["validation"] if self._validation_fraction else [])]
        self._writers = {
            name: SplitWriter(
                workspace.folder,
                name,
                progress.writers.get(name, WriterState()),
                progress.shard_tokens,
            )
            for name in names
        }

    def run(self) -> Manifest:
        """Do what is left to do."""
        workers = self._config.workers or _num_cores()
        encoder = Encoder(self._tokenizer, self._validation_fraction)
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.callback(writer.close)
            pool = stack.enter_context(EncoderPool(encoder, workers))
            sources = list(self._corpus.splits)
            for source in sources[sources.index(self._progress.source) :]:
                if source != self._progress.source:
                    self._save(source, documents_read=0)
                self._read(source, pool)
            return self._manifest()

    def _read(self, source: str, pool: EncoderPool) -> None:
        """Everything of one split of the corpus that is not on disk yet."""
        if self._is_full(source):
            return
        documents = self._with_text(self._corpus.splits[source].documents())
        count = self._progress.documents_read
        batches = _batches(self._watched(itertools.islice(documents, count, None)))
        with closing(pool.encode(batches)) as encoded_batches:
            for batch in encoded_batches:
                for document in batch:
                    split = "validation" if document.is_validation else source
                    finished_shard = self._writers[split].add(document.tokens)
                    count += 1
                    if finished_shard:
                        self._save(source, count)
                    if self._is_full(source):
                        self._tell(source, count)
                        return
                self._tell(source, count)
        self._tell(source, count)

    def _with_text(self, documents: Iterable[Document | None]) -> Iterator[Document]:
        """The documents, while counting the rows that are none."""
        self._skipped = 0
        for document in documents:
            if document is None:
                self._skipped += 1
            else:
                yield document

    def _watched(self, documents: Iterable[Document]) -> Iterator[str]:
        """The texts, while noting how much of the input they are."""
        for document in documents:
            self._input_fraction = document.fraction
            yield document.text

    def _is_full(self, source: str) -> bool:
        limit = self._config.max_tokens
        return source == "train" and limit is not None and self._writers["train"].tokens >= limit

    def _tell(self, source: str, documents: int) -> None:
        if self._report is None:
            return
        tokens = self._writers[source].tokens
        fraction = self._input_fraction
        if source == "train" and self._config.max_tokens is not None:
            fraction = max(fraction or 0.0, min(1.0, tokens / self._config.max_tokens))
        if source == "train" and self._validation_fraction:
            tokens += self._writers["validation"].tokens
        self._report(PrepareProgress(source, documents, tokens, fraction, self._skipped))

    def _save(self, source: str, documents_read: int) -> None:
        states = {name: writer.saved_state() for name, writer in self._writers.items()}
        self._progress = replace(
            self._progress, source=source, documents_read=documents_read, writers=states
        )
        self._workspace.save(self._progress)

    def _manifest(self) -> Manifest:
        splits = {}
        for name, writer in self._writers.items():
            writer.finish_shard()
            splits[name] = writer.saved_state().finished
        for name, split in splits.items():
            if not split.tokens:
                self._workspace.discard()  # other settings are needed, and would refuse this folder
                raise self._empty_split(name)
        return Manifest(FORMAT_VERSION, self._progress.recipe, self._tokenizer.identity, splits)

    def _empty_split(self, name: str) -> ConfigError:
        if name == "validation" and self._validation_fraction:
            return ConfigError(
                "prepare.validation_fraction",
                self._validation_fraction,
                "left the validation split empty",
                "Raise validation_fraction, or give validation text with validation=.",
            )
        if name == "validation" and self._config.validation is not None:
            return ConfigError(
                "prepare.validation",
                self._config.validation,
                "has no text",
                "Add documents that are more than white space, or leave it out: then a share of "
                "the training text is held back.",
            )
        return ConfigError(
            "prepare.corpus",
            self._config.corpus,
            f"has no text for its {name} split",
            "Add documents that are more than white space, or lower validation_fraction.",
        )


def _num_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, each enough work to be worth sending to another process."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
